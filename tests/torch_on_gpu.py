"""PyTorch on a fake GPU, of which PyTorch knows nothing: its tensors in host memory, said to be on `cuda:0`.

PyTorch works on them at once, as the fake CuPy does. So values are right where the calls are, and the fake still finds
work of the store's that is not ordered. What is checked of PyTorch is in which stream it hands tensors over, and which
streams it lets wait for which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from unittest import mock

import frameworks
import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Machine
from fake_gpus import DeviceFabric, gpus_of
from store_modes import Mode

from mpikv.arrays import tensors
from mpikv.spaces.gpu import Gpu
from mpikv.testing.stores import spawn_stores
from mpikv.transports.threads import Fabric

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
    """One for all ranks of a test. Each rank, a thread, has its GPU and streams in its context."""

    def __init__(self) -> None:
        self._of_rank: ContextVar[SimpleNamespace] = ContextVar("rank")
        self._kept: list[Any] = []

    @property
    def _local(self) -> Any:
        return self._of_rank.get(SimpleNamespace(gpu=None))

    def host_rank(self) -> None:
        self._of_rank.set(SimpleNamespace(gpu=None))

    def device_of(self, tensor: Any) -> Any:
        return torch.device("cuda:0" if self._local.gpu is not None else "cpu")

    def use(self, gpu: Gpu) -> None:
        gpu.cupy.machine.strangers = True  # PyTorch's own memory
        self._of_rank.set(SimpleNamespace(gpu=gpu, streams=[Stream(gpu.cupy.null)]))

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
        self._kept.append(array)  # as a tensor's storage does that PyTorch makes of an array
        values = array._values
        if values.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    def interface_of(self, tensor: Any) -> dict[str, Any]:
        """`__cuda_array_interface__`, which PyTorch refuses where a gradient is wanted."""
        if self.device_of(tensor).type == "cpu":
            raise AttributeError
        if tensor.requires_grad:
            raise RuntimeError("detach it first")
        return {}

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
        mock.patch.object(torch.Tensor, "__cuda_array_interface__", property(found.interface_of)),
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
            size = self.workers + self.servers
            gpus = gpus_of(Machine(size if self.device == "nccl" else 1), size)

            def rank(store: Any) -> Any:
                self._place(found, gpus[store.session.transport.rank])
                return body(store)

            config, hosts = self.config(**changes), self.hosts or "a" * size
            fabric = DeviceFabric(Fabric(size, tuple(hosts))) if self.device == "mpi" else None
            return spawn_stores(
                self.name,
                self.workers,
                rank,
                num_servers=self.servers,
                config=config,
                gpus=gpus,
                hosts=hosts,
                fabric=fabric,
            )

    def _place(self, torch_on_gpu: TorchOnGpu, gpu: Gpu) -> None:
        torch_on_gpu.use(gpu)


class BesideGpus(OnGpus):
    """A mode whose workers have a GPU each, and their tensors in host memory."""

    def _place(self, torch_on_gpu: TorchOnGpu, gpu: Gpu) -> None:
        torch_on_gpu.host_rank()
