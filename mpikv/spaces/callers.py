"""A caller's array on a GPU, of any library, as it was at the time of the call: where it is, and in which stream.

CuPy's, Numba's and others show `__cuda_array_interface__`; PyTorch and JAX are asked in their own words. The stream is
the one that the library puts its work into now, in this thread: what the caller has begun to write into the array is in
it. Results are ordered before whatever the caller puts into it next.

Source: the CUDA array interface, version 3 (Numba's documentation, "CUDA Array Interface"); PyTorch,
`torch.cuda.current_stream`.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from mpikv import tensors
from mpikv.arrays import BFLOAT16, SUPPORTED_DTYPES, dtype_named
from mpikv.errors import UnsupportedError
from mpikv.spaces.driver import Driver, Event

LEGACY = 1  # CUDA's default stream, as `__cuda_array_interface__` numbers it
DLPACK_GPUS = (2, 13)  # kDLCUDA and kDLCUDAManaged of dlpack.h
JAX_GPUS = ("gpu", "cuda")  # platforms, by JAX's version


class Caller(NamedTuple):
    """An array of the caller's. strides: in bytes; None: contiguous. number: of its GPU, whose stream it is.

    at: the stream's work when the call was made.
    """

    array: Any  # kept alive
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    stream: int
    number: int
    at: Event

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.size * self.dtype.itemsize


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
    """The number of the GPU that an array is on; None in host memory. 0 where its library does not say."""
    if not on_gpu(array):
        return None
    if tensors.is_tensor(array):
        return int(tensors.device_of(array).index)
    if tensors.is_jax(array):
        return int(next(iter(array.devices())).local_hardware_id)
    return int(getattr(getattr(array, "device", None), "id", 0))


def seen(array: Any, driver: Driver) -> Caller:
    """What is known of an array for which `on_gpu` is true. Records an event in its stream.

    Raises UnsupportedError for a dtype that a store cannot hold, an array that is spread over several GPUs, and one
    that says neither where it is nor in which stream.
    """
    if tensors.is_tensor(array):
        found = _of_tensor(array)
    elif tensors.is_jax(array):
        found = _of_jax(array)
    else:
        found = _of_interface(array, driver)
    address, shape, strides, dtype, stream, number = found
    if dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(one) for one in SUPPORTED_DTYPES)
        raise UnsupportedError(f"an array on GPU {number} has dtype {dtype}; a store holds {names}")
    if strides == contiguous(shape, dtype.itemsize) or 0 in shape:
        strides = None
    return Caller(array, address, shape, strides, dtype, stream, number, driver.record(stream, number))


_Found = tuple[int, tuple[int, ...], "tuple[int, ...] | None", "np.dtype[Any]", int, int]


def _of_interface(array: Any, driver: Driver) -> _Found:
    if not hasattr(array, "__cuda_array_interface__"):
        raise UnsupportedError(
            f"a {type(array).__module__}.{type(array).__name__} on a GPU has no __cuda_array_interface__: hand over "
            "cupy.from_dlpack(array), which shares its memory"
        )
    told = array.__cuda_array_interface__
    address, shape, strides = told["data"][0], tuple(told["shape"]), told.get("strides")
    dtype = BFLOAT16 if told["typestr"][1:] == "V2" else np.dtype(told["typestr"])
    number = getattr(getattr(array, "device", None), "id", driver.number)  # CuPy's device has a number
    return address, shape, None if strides is None else tuple(strides), dtype, told.get("stream") or LEGACY, number


def _of_jax(array: Any) -> _Found:
    """JAX says of no stream when it will have written an array: so the host waits for that, and for nothing else."""
    devices = list(array.devices())
    if len(devices) > 1:
        raise UnsupportedError(
            f"a JAX array is spread over {len(devices)} GPUs: hand over its parts (addressable_shards), one per device"
        )
    array.block_until_ready()
    return (
        array.unsafe_buffer_pointer(),
        tuple(array.shape),
        None,
        np.dtype(array.dtype),
        LEGACY,
        devices[0].local_hardware_id,
    )


def _of_tensor(tensor: Any) -> _Found:
    torch = sys.modules["torch"]
    if tensor.layout != torch.strided or tensor.is_neg() or tensor.is_conj():
        raise UnsupportedError(
            f"a tensor of layout {tensor.layout} on {tensor.device} whose values are not in its memory as they are: "
            "hand over tensor.to_dense() or tensor.resolve_neg()"
        )
    dtype = dtype_named(str(tensor.dtype).rpartition(".")[2])
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    device = tensors.device_of(tensor)
    stream = torch.cuda.current_stream(device).cuda_stream or LEGACY
    return tensor.data_ptr(), tuple(tensor.shape), strides, dtype, stream, device.index


def contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides, in bytes, of an array in C order."""
    strides, step = [], itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
