"""Device arrays that the library can only copy to the host and back: those of a device that is no GPU of the store.

They lie in host memory, show `__cuda_array_interface__` and have the part of CuPy's array that the library then uses,
as strict as CuPy is: no silent conversion to NumPy, `set` takes one dtype and shape only and refuses a strided target,
`astype` copies. A `ForeignDevice` counts what crosses between it and the host. Arrays on the GPU that the store uses,
with streams and an order of work, are those of the fake CuPy (fake_cupy.py).

Source of the rules: CuPy 13, cupy/_core/core.pyx (ndarray.get, ndarray.set, ndarray.__array__).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from fake_cupy import check_set

HostArray = npt.NDArray[Any]


class ForeignDevice:
    """A device; `gets` and `sets` count the copies to and from the host."""

    def __init__(self) -> None:
        self.gets = 0
        self.sets = 0

    def asarray(self, array: npt.ArrayLike) -> ForeignArray:
        """Return a copy of a host array on this device."""
        return ForeignArray(self, np.array(array))


class ForeignArray:
    """An array on a `ForeignDevice`. Tests may look at `memory`, the library must not."""

    def __init__(self, device: ForeignDevice, memory: HostArray) -> None:
        self.fake = device
        self.memory = memory

    @property
    def shape(self) -> tuple[int, ...]:
        """As NumPy's."""
        return self.memory.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """As NumPy's."""
        return self.memory.dtype

    @property
    def size(self) -> int:
        """As NumPy's."""
        return self.memory.size

    @property
    def ndim(self) -> int:
        """As NumPy's."""
        return self.memory.ndim

    @property
    def flags(self) -> Any:
        """As NumPy's; CuPy has `c_contiguous`, `f_contiguous` and `owndata`."""
        return self.memory.flags

    @property
    def device(self) -> ForeignDevice:
        """As in the array API."""
        return self.fake

    def __array_namespace__(self) -> Any:
        """As in the array API: where functions of this library are; here the one that is used."""
        return _Namespace

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.memory.ctypes.data, False),
            "strides": None if self.memory.flags.c_contiguous else self.memory.strides,
            "version": 3,
        }

    def __array__(self, *args: object, **kwargs: object) -> HostArray:
        """Raise TypeError, as CuPy does."""
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Use `.get()` for it.")

    def get(self) -> HostArray:
        """Return a copy in host memory."""
        self.fake.gets += 1
        return np.array(self.memory)

    def set(self, arr: HostArray) -> None:
        """Copy a host array of exactly this shape and dtype here."""
        check_set(self, arr)
        self.fake.sets += 1
        self.memory[...] = arr

    def astype(self, dtype: npt.DTypeLike) -> ForeignArray:
        """Return a copy in another dtype, on the device."""
        return ForeignArray(self.fake, self.memory.astype(dtype))

    def copy(self) -> ForeignArray:
        """Return a copy in C order on the device."""
        return ForeignArray(self.fake, self.memory.copy(order="C"))

    def __getitem__(self, index: Any) -> ForeignArray:
        return ForeignArray(self.fake, np.asarray(self.memory[index]))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.memory[index] = self._operand(value)

    def __iadd__(self, other: Any) -> ForeignArray:
        self.memory += self._operand(other)
        return self

    def __add__(self, other: Any) -> ForeignArray:
        return ForeignArray(self.fake, np.asarray(self.memory + self._operand(other)))

    @staticmethod
    def _operand(value: Any) -> Any:
        if isinstance(value, ForeignArray):
            return value.memory
        if isinstance(value, np.ndarray) and value.ndim > 0:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        return value


class _Namespace:
    """The array API's functions, of which there is one."""

    @staticmethod
    def asarray(obj: HostArray, /, *, device: ForeignDevice) -> ForeignArray:
        """A copy of a host array on a device."""
        return device.asarray(obj)
