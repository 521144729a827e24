"""A caller's array on a GPU, of any library: as CuPy's array of the same memory, with the caller's current stream.

CuPy, Numba and others offer `__cuda_array_interface__`; PyTorch's and JAX's arrays are read through their own methods.
The stream is the one into which the library puts its work now, in this thread: it contains all writes into the array
that the caller has begun. The store's results are ordered before any work that the caller puts into it next. The
stream's object is kept alive, since a library may destroy the stream with its object.

Source: the CUDA array interface, version 3 (Numba's documentation, "CUDA Array Interface"); PyTorch,
`torch.cuda.current_stream`; CuPy 14, `Stream.from_external`.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays import tensors
from mpikv.arrays.as_numpy import BFLOAT16, SUPPORTED_DTYPES, dtype_named, unsupported
from mpikv.errors import UnsupportedError
from mpikv.spaces.gpu import Gpu

LEGACY, PER_THREAD = 1, 2  # CUDA's default streams, as `__cuda_array_interface__` numbers them
DLPACK_GPUS = (2, 13)  # kDLCUDA and kDLCUDAManaged of dlpack.h
JAX_GPUS = ("gpu", "cuda")  # platforms, by JAX's version


class CallersGpuArray(NamedTuple):
    """values: CuPy's, of its memory. number: of its GPU and `stream`. event: after all work there before the call."""

    array: Any  # kept alive
    values: Any
    stream: Any
    number: int
    event: Any


class _Stream:
    """A stream of another library, by its address. owner: the object that keeps it alive."""

    def __init__(self, number: int, owner: object) -> None:
        self._number, self._owner = number, owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._number


def on_gpu(array: Any) -> bool:
    """Whether an array is in a GPU's memory."""
    if isinstance(array, (np.ndarray, np.generic)):
        return False
    if tensors.is_tensor(array):
        return bool(tensors.device_of(array).type == "cuda")
    if tensors.is_jax(array):
        return not tensors.is_traced(array) and any(one.platform in JAX_GPUS for one in array.devices())
    if hasattr(array, "__cuda_array_interface__"):
        return True
    device = getattr(array, "__dlpack_device__", None)
    return callable(device) and device()[0] in DLPACK_GPUS


def gpu_of(array: Any) -> int | None:
    """The number of the GPU that an array is on; None in host memory. 0 if its library does not give a number."""
    if not on_gpu(array):
        return None
    if tensors.is_tensor(array):
        return int(tensors.device_of(array).index)
    if tensors.is_jax(array):
        return int(next(iter(array.devices())).local_hardware_id)
    return int(getattr(getattr(array, "device", None), "id", 0))


def callers_gpu_array(array: Any, gpu: Gpu) -> CallersGpuArray:
    """Describe an array for which `on_gpu` is true. Records an event in its stream.

    Raises UnsupportedError for a dtype that a store cannot hold, for an array that is spread over several GPUs, and for
    one that offers neither its address nor its stream.
    """
    number = gpu.number
    if tensors.is_tensor(array) or tensors.is_jax(array) or hasattr(getattr(array, "device", None), "id"):
        number = gpu_of(array) or 0
    with gpu.current("sees an array of the caller's", number):
        if tensors.is_tensor(array):
            values, stream = _of_tensor(array, gpu, number)
        elif tensors.is_jax(array):
            values, stream = _of_jax(array, gpu, number)
        elif isinstance(array, gpu.cupy.ndarray):
            values, stream = array, gpu.cupy.cuda.get_current_stream()
            _check_stream(stream.ptr)
        else:
            values, stream = _of_interface(array, gpu, number)
        if values.dtype not in SUPPORTED_DTYPES:
            raise unsupported(f"an array on GPU {number} has dtype {values.dtype}")
        return CallersGpuArray(array, values, stream, number, stream.record(gpu.event()))


def _stream_of(gpu: Gpu, ptr: int, owner: object) -> Any:
    _check_stream(ptr)
    return gpu.cupy.cuda.Stream.from_external(_Stream(ptr, owner))


def _check_stream(ptr: int) -> None:
    if ptr == PER_THREAD:
        raise UnsupportedError(
            "an array of CUDA's per-thread default stream, which is another one in every thread: use a stream of your "
            "own (cupy.cuda.Stream()), or the legacy default stream"
        )


def _of_interface(array: Any, gpu: Gpu, number: int) -> tuple[Any, Any]:
    if not hasattr(array, "__cuda_array_interface__"):
        raise UnsupportedError(
            f"a {type(array).__module__}.{type(array).__name__} on a GPU has no __cuda_array_interface__: pass "
            "cupy.from_dlpack(array), which shares its memory"
        )
    interface = array.__cuda_array_interface__
    dtype = BFLOAT16 if interface["typestr"][1:] == "V2" else np.dtype(interface["typestr"])
    strides = interface.get("strides")
    values = gpu.array_at(interface["data"][0], tuple(interface["shape"]), dtype, array, strides=strides, number=number)
    return values, _stream_of(gpu, interface.get("stream") or LEGACY, array)


def _of_jax(array: Any, gpu: Gpu, number: int) -> tuple[Any, Any]:
    """JAX does not tell in which stream it writes an array, so the host blocks until this array is written."""
    if len(array.devices()) > 1:
        raise UnsupportedError(
            f"a JAX array is spread over {len(array.devices())} GPUs: pass its shards (addressable_shards), one per "
            "device"
        )
    array.block_until_ready()
    address = array.unsafe_buffer_pointer()
    values = gpu.array_at(address, tuple(array.shape), np.dtype(array.dtype), array, number=number)
    return values, _stream_of(gpu, LEGACY, array)


def _of_tensor(tensor: Any, gpu: Gpu, number: int) -> tuple[Any, Any]:
    torch = sys.modules["torch"]
    if tensor.layout != torch.strided or tensor.is_neg() or tensor.is_conj():
        raise UnsupportedError(
            f"a tensor of layout {tensor.layout} on {tensor.device} whose memory does not hold its values as such: "
            "pass tensor.to_dense() or tensor.resolve_neg()"
        )
    dtype = dtype_named(str(tensor.dtype).rpartition(".")[2])
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    stream = torch.cuda.current_stream(tensors.device_of(tensor))
    values = gpu.array_at(tensor.data_ptr(), tuple(tensor.shape), dtype, tensor, strides=strides, number=number)
    return values, _stream_of(gpu, stream.cuda_stream or LEGACY, stream)
