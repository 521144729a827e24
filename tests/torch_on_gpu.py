"""PyTorch on a fake GPU, of which PyTorch knows nothing: its tensors in host memory, said to be on `cuda:0`.

PyTorch works on them at once, as the fake CuPy does. So values are right where the calls are, and the fake still finds
work of the store's that is not ordered. What is checked of PyTorch is in which stream it hands tensors over, and which
streams it lets wait for which.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import frameworks
import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Machine
from fake_gpus import gpus_of
from store_modes import Mode

from mpikv.arrays import tensors
from mpikv.spaces.gpu import Gpu
from mpikv.testing.stores import spawn_stores

torch = frameworks.need("torch")


class Stream:
    """As torch.cuda.Stream. waited: the streams that were waited for."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.cuda_stream = stream, stream.ptr
        self.waited: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.cuda_stream)
        self.stream.wait_event(other.stream.record())


class TorchOnGpu:
    """One for all ranks of a test; `here` says which GPU this thread, a rank, has."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._kept: list[Any] = []

    def host_rank(self) -> None:
        """This thread has no GPU."""
        self._local.gpu = None

    def device_of(self, tensor: Any) -> Any:
        return torch.device("cuda:0" if getattr(self._local, "gpu", None) is not None else "cpu")

    def use(self, gpu: Gpu) -> None:
        gpu.cupy.machine.strangers = True  # PyTorch's own memory
        self._local.gpu, self._local.streams = gpu, [Stream(gpu.cupy.null)]

    @contextmanager
    def stream(self) -> Iterator[Stream]:
        made = Stream(self._local.gpu.cupy.cuda.Stream(non_blocking=True))
        self._local.streams.append(made)
        try:
            yield made
        finally:
            self._local.streams.remove(made)

    def current_stream(self, device: Any = None) -> Stream:
        streams: list[Stream] = self._local.streams
        return streams[-1]

    def tensor_of(self, array: Any) -> Any:
        """A tensor in the memory of an array of the GPU."""
        self._kept.append(array)  # as a tensor's storage does that PyTorch makes of an array
        values = array._values
        if values.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    def put(self, module: Any) -> Any:
        """Move a module's parameters and buffers to the GPU of this rank, if it has one. Returns the module."""
        for one in (*module.parameters(), *module.buffers()) if self._local.gpu else ():
            bits = one.detach().contiguous()
            bits = bits.view(torch.int16) if bits.dtype == torch.bfloat16 else bits
            array = self._local.gpu.cupy.asarray(bits.numpy())
            one.data = self.tensor_of(array).view(one.dtype)
        return module


@contextmanager
def patched() -> Iterator[TorchOnGpu]:
    found = TorchOnGpu()
    with (
        mock.patch.object(tensors, "device_of", found.device_of),
        mock.patch.object(tensors, "on_gpu", found.tensor_of),
        mock.patch.object(torch.cuda, "current_stream", found.current_stream),
    ):
        yield found


@pytest.fixture
def cuda() -> Iterator[TorchOnGpu]:
    with patched() as found:
        yield found


class OnGpus(Mode):
    """A mode whose workers have their tensors on a GPU each; its `device` is the path of keys."""

    def run(self, body: Callable[[Any], Any], *, on_gpu: TorchOnGpu | None = None, **changes: Any) -> list[Any]:
        with patched() if on_gpu is None else contextlib.nullcontext(on_gpu) as found:
            gpus = gpus_of(Machine(), self.workers)

            def rank(store: Any) -> Any:
                found.use(gpus[store.rank])
                return body(store)

            config = self.config(**changes)
            return spawn_stores(self.name, self.workers, rank, config=config, gpus=gpus, hosts=self.hosts or None)
