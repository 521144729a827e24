"""Device arrays that the library can only copy to the host and back: those of a device that is no GPU of the store.

They lie in host memory, show `__cuda_array_interface__` and have the part of CuPy's array that the library then uses,
as strict as CuPy is: no silent conversion to NumPy, `set` takes one dtype and shape only and refuses a strided target,
`astype` copies. A `ForeignDevice` counts what crosses between it and the host. Arrays on the GPU that the store uses,
with streams and an order of work, are those of the fake CuPy (fake_cupy.py).

Source of the rules: CuPy 13, cupy/_core/core.pyx (ndarray.get, ndarray.set, ndarray.__array__).
"""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from fake_cupy import check_set

HostArray = npt.NDArray[Any]


class ForeignDevice:
    """A device; `gets` and `sets` count the copies to and from the host."""

    def __init__(self) -> None:
        self.gets = self.sets = 0

    def asarray(self, array: npt.ArrayLike) -> ForeignArray:
        return ForeignArray(self, np.array(array))


class ForeignArray:
    """An array on a `ForeignDevice`. Tests may look at `memory`, the library must not."""

    def __init__(self, device: ForeignDevice, memory: HostArray) -> None:
        self.fake = self.device = device
        self.memory = memory

    shape, dtype, size, ndim, flags = (
        property(attrgetter(f"memory.{name}")) for name in ("shape", "dtype", "size", "ndim", "flags")
    )

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(asarray=lambda obj, /, *, device: device.asarray(obj))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = None if self.memory.flags.c_contiguous else self.memory.strides
        data = self.memory.ctypes.data, False
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "strides": strides, "version": 3}

    def __array__(self, *args: object, **kwargs: object) -> HostArray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Use `.get()` for it.")

    def get(self) -> HostArray:
        self.fake.gets += 1
        return np.array(self.memory)

    def set(self, arr: HostArray) -> None:
        check_set(self, arr)
        self.fake.sets += 1
        self.memory[...] = arr

    def astype(self, dtype: npt.DTypeLike) -> ForeignArray:
        return ForeignArray(self.fake, self.memory.astype(dtype))

    def copy(self) -> ForeignArray:
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


class Tensor:
    """An array that has DLPack and nothing else."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.memory.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.memory.__dlpack_device__()
