"""An array in device memory, as the store works on it: contiguous, of one of the store's dtypes.

It looks like NumPy's as far as the store's code needs: flat slices, `reshape`, `view`, and NumPy's functions of two
arrays (`np.add(a, b, out=c)`), which its space launches on the store's stream. It shows `__cuda_array_interface__`, so
that mpi4py takes it. Its values come to the host only through its space.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.spaces.pool import Memory

if TYPE_CHECKING:
    from mpikv.spaces.device import DeviceSpace


class Flags:
    """As of a NumPy array in C order that may be written to."""

    c_contiguous = writeable = aligned = True


class DeviceArray:
    """An array of `shape` and `dtype` that begins `offset_bytes` into some memory, which lives as long as it does.

    space: the one that it belongs to, and that works on it.
    """

    __slots__ = ("__weakref__", "dtype", "memory", "offset_bytes", "shape", "space")

    flags = Flags()

    def __init__(
        self, space: DeviceSpace, memory: Memory, offset_bytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.space, self.memory, self.offset_bytes = space, memory, offset_bytes
        self.shape, self.dtype = shape, dtype

    @property
    def size(self) -> int:
        """As NumPy's."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """As NumPy's."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """As NumPy's."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """As NumPy's."""
        return self.size * self.dtype.itemsize

    @property
    def address(self) -> int:
        """Where its first element is."""
        return self.memory.address + self.offset_bytes

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype}{self.shape} on GPU {self.space.driver.number}>"

    def reshape(self, *shape: Any) -> DeviceArray:
        """The same memory in another shape. ValueError where the number of elements differs."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if -1 in wanted:
            known = math.prod(n for n in wanted if n != -1)
            wanted = tuple(self.size // max(known, 1) if n == -1 else n for n in wanted)
        if math.prod(wanted) != self.size:
            raise ValueError(f"an array of {self.size} elements cannot have the shape {wanted}")
        return DeviceArray(self.space, self.memory, self.offset_bytes, wanted, self.dtype)

    def view(self, dtype: Any) -> DeviceArray:
        """The same bytes of a flat array as another dtype."""
        found = np.dtype(dtype)
        n_elems, rest = divmod(self.nbytes, found.itemsize)
        if self.ndim != 1 or rest:
            raise ValueError(f"{self!r} cannot be seen as {found}")
        return DeviceArray(self.space, self.memory, self.offset_bytes, (n_elems,), found)

    def __getitem__(self, index: slice) -> DeviceArray:
        begin, end, step = index.indices(self.shape[0]) if isinstance(index, slice) and self.ndim == 1 else (0, 0, 0)
        if step != 1:
            raise TypeError(f"{self!r} has slices of consecutive elements, and is flat, not {index!r}")
        n_elems, offset_bytes = max(0, end - begin), self.offset_bytes + begin * self.itemsize
        return DeviceArray(self.space, self.memory, offset_bytes, (n_elems,), self.dtype)

    def __setitem__(self, index: Any, values: Any) -> None:
        whole = index is Ellipsis
        self.space.copy(self.reshape(-1) if whole else self[index], values.reshape(-1) if whole else values)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", (None,))[0]
        if method != "__call__" or kwargs or not isinstance(out, DeviceArray) or len(inputs) != 2:
            return NotImplemented
        if all(isinstance(one, DeviceArray) for one in inputs):
            self.space.combine(*inputs, out, ufunc)
            return out
        if ufunc is np.divide and isinstance(inputs[0], DeviceArray) and not isinstance(inputs[1], np.ndarray):
            self.space.divide(inputs[0], inputs[1], out)
            return out
        return NotImplemented

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self!r} is in device memory: its space brings it to the host (to_host)")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # Version 3 without a stream: who takes it must know himself that what the store has begun is done.
        typestr = self.dtype.str if self.dtype.kind in "fiu" else "|V2"  # bfloat16 has no name there
        data = (self.address if self.size else 0, False)
        return {"shape": self.shape, "typestr": typestr, "data": data, "strides": None, "version": 3, "stream": None}
