"""A caller's array on a GPU, of any library, as it was at the time of the call: where it is, and in which stream.

Told by what an array can do, not by its library: `__cuda_array_interface__` (CuPy, Numba), PyTorch's own attributes,
and DLPack for the rest. The stream is the one that the library puts its work into now, in this thread: what the caller
has begun to write into the array is in it. Results are ordered before whatever the caller puts into it next.

Source: the CUDA array interface, version 3 (Numba's documentation, "CUDA Array Interface"); PyTorch,
`torch.cuda.current_stream`.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from mpikv import tensors
from mpikv.arrays import BFLOAT16, dtype_of
from mpikv.spaces.driver import Driver, Event

LEGACY_STREAM = 1  # CUDA's default stream, as `__cuda_array_interface__` numbers it


class Caller(NamedTuple):
    """An array of the caller's. strides: in bytes; None: contiguous. at: the stream's work when the call was made."""

    array: Any  # kept alive
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    stream: int
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
        return bool(array.device.type == "cuda")
    if hasattr(type(array), "__cuda_array_interface__"):
        return True
    device = getattr(array, "__dlpack_device__", None)
    return device is not None and not isinstance(array, type) and device()[0] in (2, 13)  # CUDA, CUDA managed


def seen(array: Any, driver: Driver) -> Caller:
    """What is known of an array for which `on_gpu` is true. Records an event in its stream."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    if tensors.is_tensor(array):
        address, strides, dtype, stream = _of_tensor(array)
        shape = tuple(array.shape)
    else:
        shown = array.__cuda_array_interface__
        address, shape, strides = shown["data"][0], tuple(shown["shape"]), shown.get("strides")
        dtype = BFLOAT16 if shown["typestr"][1:] == "V2" else np.dtype(shown["typestr"])
        stream = shown.get("stream") or LEGACY_STREAM
    if strides is not None and tuple(strides) == contiguous(shape, dtype.itemsize):
        strides = None
    return Caller(array, address, shape, strides, dtype, stream, driver.record(stream))


def _of_tensor(tensor: Any) -> tuple[int, tuple[int, ...], np.dtype[Any], int]:
    torch = sys.modules["torch"]
    dtype = dtype_of(str(tensor.dtype).rpartition(".")[2])
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    stream = torch.cuda.current_stream(tensor.device).cuda_stream or LEGACY_STREAM
    return tensor.data_ptr(), strides, dtype, stream


def contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides, in bytes, of an array in C order."""
    strides, step = [], itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
