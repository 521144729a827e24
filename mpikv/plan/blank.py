"""Arrays that know their length and nothing else, for simulations of more ranks than fit into memory.

A `Blank` is a NumPy array all of whose elements lie in one place (stride 0), so it takes no memory whatever its length.
Slices of it are blank, too. Adding to it, copying into it and making another like it do nothing but tell its `Meter`
how many bytes a real array would have moved. Whatever else a collective might do with an array raises TypeError, so
that no work goes uncounted.

Cost: about a microsecond for each operation, whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from mpikv.arrays import HostArray


class Meter(Protocol):
    """Who is told what real arrays would have cost."""

    def added(self, n_bytes: int) -> None:
        """So many bytes were added to others."""
        ...

    def copied(self, n_bytes: int) -> None:
        """So many bytes were copied."""
        ...


class Blank(np.ndarray[Any, np.dtype[Any]]):
    """(n,) of any dtype without memory. meter: who is told. origin: the same in all views of one array."""

    meter: Meter
    origin: object

    def __array_finalize__(self, obj: Any) -> None:
        """A view has what its base has."""
        self.meter = getattr(obj, "meter", _NOBODY)
        self.origin = getattr(obj, "origin", None)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **_kwargs: Any) -> Any:
        """Additions alone."""
        if ufunc is not np.add or method != "__call__":
            raise TypeError(f"a blank array can be added, not {ufunc.__name__}")
        meter = _meter((*inputs, *out))
        if out:
            meter.added(out[0].nbytes)
            return out[0]
        longest = max((one for one in inputs if isinstance(one, np.ndarray)), key=lambda one: one.size)
        meter.added(longest.nbytes)
        return blank(longest.size, longest.dtype, meter)

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The functions that collectives and servers use."""
        if func not in _FUNCTIONS:
            raise TypeError(f"a blank array does not know np.{func.__name__}")
        return _FUNCTIONS[func](*args, **kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        """A copy into it."""
        self.meter.copied(self[key].nbytes)

    def copy(self, order: Any = "C") -> Any:
        """Another one."""
        self.meter.copied(self.nbytes)
        return blank(self.size, self.dtype, self.meter)

    def view(self, *args: Any, **_kwargs: Any) -> Any:
        """The same bytes as another dtype."""
        dtype = np.dtype(args[0])
        found = blank(self.nbytes // dtype.itemsize, dtype, self.meter)
        found.origin = self.origin
        return found


class _Nobody:
    def added(self, n_bytes: int) -> None:
        """Not counted."""

    def copied(self, n_bytes: int) -> None:
        """Not counted."""


_NOBODY = _Nobody()
_ZERO = bytearray(16)  # longer than any element; never written to


def blank(n_elems: int, dtype: Any, meter: Meter = _NOBODY) -> Blank:
    """A blank array of `n_elems` elements."""
    array: Blank = np.ndarray.__new__(Blank, (n_elems,), np.dtype(dtype), _ZERO, 0, (0,))
    array.meter, array.origin = meter, object()
    return array


def _meter(values: Iterable[Any]) -> Meter:
    return next((value.meter for value in values if isinstance(value, Blank) and value.meter is not _NOBODY), _NOBODY)


def _empty_like(array: Blank, **_kwargs: Any) -> Blank:
    return blank(array.size, array.dtype, array.meter)


def _copyto(destination: HostArray, source: Any, **_kwargs: Any) -> None:
    _meter((destination, source)).copied(destination.nbytes)


def _concatenate(arrays: Iterable[HostArray], **_kwargs: Any) -> Blank:
    parts = list(arrays)
    n_bytes = sum(part.nbytes for part in parts)
    meter = _meter(parts)
    meter.copied(n_bytes)
    return blank(n_bytes // parts[0].itemsize, parts[0].dtype, meter)


def _may_share_memory(one: Any, other: Any, **_kwargs: Any) -> bool:
    return getattr(one, "origin", one) is getattr(other, "origin", other)


_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    np.empty_like: _empty_like,
    np.copyto: _copyto,
    np.concatenate: _concatenate,
    np.may_share_memory: _may_share_memory,
}
