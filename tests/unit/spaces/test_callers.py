"""What is known of a caller's array on a GPU: by the interface, and in PyTorch's and JAX's own words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Machine
from fake_gpus import gpu_of as fake_gpu_of

from mpikv.arrays import tensors
from mpikv.errors import UnsupportedError
from mpikv.spaces import callers
from mpikv.spaces.callers import PER_THREAD, CallersGpuArray, gpu_of, on_gpu


class Shown:
    def __init__(self, number: int | None = None, **told: Any) -> None:
        self.__cuda_array_interface__ = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3, **told}
        if number is not None:
            self.device = SimpleNamespace(id=number)


def seen(array: Any, number: int = 1) -> CallersGpuArray:
    """On one of three GPUs, whose memory nobody looks into."""
    machine = Machine(3)
    machine.strangers = True
    cupy = machine.process()
    cupy.streams[77] = cupy.streams[1]
    return callers.callers_gpu_array(array, fake_gpu_of(cupy, number))


@pytest.mark.parametrize(
    ("strides", "contiguous"), [(None, True), ((12, 4), True), ((4, 8), False), ((24, 4), False), ((0, 4), False)]
)
def test_the_interface(strides: Any, contiguous: bool) -> None:
    found = seen(Shown(stream=77, strides=strides))
    assert (found.values.data.ptr, found.values.shape, found.values.dtype) == (4096, (2, 3), np.float32)
    assert found.values.flags.c_contiguous == contiguous
    assert found.number == 1
    assert seen(Shown(number=2)).number == gpu_of(Shown(number=2)) == 2
    assert seen(Shown()).stream.ptr == seen(Shown(stream=None)).stream.ptr == 1  # the default one


def test_bfloat16_has_no_name_in_the_interface() -> None:
    assert seen(Shown(typestr="|V2")).values.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (Shown(stream=PER_THREAD), "per-thread default stream"),
        (Shown(typestr="<c8"), "GPU 1 has dtype complex64; a store holds float16"),
        (SimpleNamespace(__dlpack_device__=lambda: (2, 0), __dlpack__=None), r"cupy\.from_dlpack"),
    ],
    ids=["stream", "dtype", "no interface"],
)
def test_what_is_refused_is_told_why(array: Any, why: str) -> None:
    assert on_gpu(array)
    with pytest.raises(UnsupportedError, match=why):
        seen(array)


def test_what_is_not_on_a_gpu(torch: Any) -> None:
    assert not any(map(on_gpu, (np.zeros(2), np.float32(1), [1.0], None, "a", 3, torch.zeros(2))))


class Tensor(SimpleNamespace):
    """What is asked of a CUDA tensor of PyTorch; there is no GPU to make one on."""

    def __init__(self, torch: Any, dtype: Any, *, stride: tuple[int, ...] = (3, 1), neg: bool = False) -> None:
        device = SimpleNamespace(type="cuda", index=2)
        super().__init__(device=device, layout=torch.strided, dtype=dtype, shape=(2, 3), data_ptr=lambda: 512)
        self.stride, self.is_neg, self.is_conj = lambda: stride, lambda: neg, lambda: False


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(tensors, "is_tensor", lambda array: isinstance(array, (Tensor, torch.Tensor)))
    streams = {2: SimpleNamespace(cuda_stream=0)}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device.index])
    torch.streams = streams
    return torch


def test_a_tensor(torch: Any) -> None:
    tensor = Tensor(torch, torch.bfloat16, stride=(1, 2))
    assert on_gpu(tensor)
    found = seen(tensor)
    assert (found.values.data.ptr, found.values.dtype, found.values.strides) == (512, ml_dtypes.bfloat16, (2, 4))
    assert (found.stream.ptr, found.number) == (1, 2)  # PyTorch's default stream is CUDA's
    torch.streams[2].cuda_stream = 77
    assert seen(Tensor(torch, torch.float32)).values.flags.c_contiguous
    with pytest.raises(UnsupportedError, match="resolve_neg"):
        seen(Tensor(torch, torch.float32, neg=True))


class JaxArray:
    def __init__(self, n_devices: int = 1, platform: str = "gpu") -> None:
        self.shape, self.dtype, self.ready = (4,), np.dtype(np.float16), False
        self._devices = [SimpleNamespace(platform=platform, local_hardware_id=i) for i in range(n_devices)]

    def devices(self) -> list[Any]:
        return self._devices

    def block_until_ready(self) -> None:
        self.ready = True

    def unsafe_buffer_pointer(self) -> int:
        assert self.ready
        return 1024


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers.tensors, "is_jax", lambda array: isinstance(array, JaxArray))
    monkeypatch.setattr(callers.tensors, "is_traced", lambda array: False)


@pytest.mark.usefixtures("jax")
def test_a_jax_array_is_waited_for_on_the_host() -> None:
    array = JaxArray()
    found = seen(array)
    assert array.ready
    assert (found.values.data.ptr, found.values.shape, found.values.dtype) == (1024, (4,), np.float16)
    assert (found.stream.ptr, found.number) == (1, 0)
    assert not on_gpu(JaxArray(platform="cpu"))
    assert on_gpu(JaxArray(platform="cuda"))


@pytest.mark.usefixtures("jax")
def test_a_jax_array_on_several_gpus() -> None:
    with pytest.raises(UnsupportedError, match="spread over 2 GPUs"):
        seen(JaxArray(2))
