"""An array in device memory, as the store works on it: flat or shaped, contiguous, of one of the store's dtypes.

It looks like NumPy's as far as the store's code needs: slices, `reshape`, `view`, and NumPy's functions on it
(`np.add(a, b, out=c)`), which its space launches on its stream. It shows `__cuda_array_interface__`, so that mpi4py and
array libraries take it. Its values come to the host only through its space.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpikv.spaces.device import DeviceSpace
    from mpikv.spaces.pool import Memory


class DeviceArray:
    """(shape) of `dtype` at `offset_bytes` of some device memory, which lives as long as an array of it does."""

    __slots__ = ("__weakref__", "dtype", "memory", "offset_bytes", "shape", "space")

    def __init__(
        self, space: DeviceSpace, memory: Memory, offset_bytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.space, self.memory, self.offset_bytes = space, memory, offset_bytes
        self.shape, self.dtype = shape, dtype

    # size, nbytes, itemsize, ndim, address, flags, reshape, view, __getitem__ (slices of the flat array),
    # __setitem__, __array_ufunc__, __cuda_array_interface__, __array__ (TypeError)

    @property
    def size(self) -> int:
        """As NumPy's."""
        return math.prod(self.shape)

    @property
    def address(self) -> int:
        """Where its first element is."""
        return self.memory.address + self.offset_bytes
