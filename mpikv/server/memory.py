"""The server's memory: arrays that are used again, and values that messages still read.

A gradient of 64 MiB that comes in new memory each round costs as much in page faults as in the adding. So partitions
come into arrays that were used before, the last one first, which the cache may still hold.

A reply is sent straight from the value's own memory. Until it has left, the value must not change: `ReadableMemory`
counts its readers, and an update that comes too early goes into a copy.

On a host whose workers share memory with the server all of it lies there, so that they read values where they are. What
they push is taken by reference: it stays in their memory until it has been added; nothing is ever written into it.

Cost: what is free stays held, `Pool.held_bytes` in all; it never grows beyond what was in use at one time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.spaces.base import Space


class Source(Protocol):
    """Where memory comes from that others can see."""

    def take(self, n_bytes: int) -> HostArray | None:
        """(n_bytes,) of uint8; None when there is no more."""
        ...

    def give(self, array: HostArray) -> None:
        """Take it back."""
        ...


class Pool:
    """Arrays by their size. held_bytes: all that this pool ever made and still has, in use or free.

    space: how they are made and worked on. source: where their memory comes from, where others are to see it.
    """

    def __init__(self, source: Source | None, space: Space) -> None:
        self.held_bytes = 0
        self._space = space
        self._source = source
        self._free: dict[int, list[HostArray]] = {}
        self._referred: dict[int, tuple[HostArray, Callable[[], None]]] = {}  # by the array's id

    def take(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """An array (n_elems,) of any content."""
        n_bytes = n_elems * dtype.itemsize
        free = self._free.get(n_bytes)
        if free:
            return free.pop().view(dtype)
        self.held_bytes += n_bytes
        array = None if self._source is None else self._source.take(n_bytes)
        return self._space.empty(n_elems, dtype) if array is None else array.view(dtype)

    def copy(self, values: HostArray) -> HostArray:
        """A copy, in memory of this pool."""
        array = self.take(values.size, values.dtype)
        self._space.copy(array, values)
        return array

    def give(self, array: HostArray) -> None:
        """Give back an array that nobody uses any more: one that `take` returned, an equal of it, or another's."""
        referred = self._referred.pop(id(array), None) if self._referred else None
        if referred is not None:
            referred[1]()
        else:
            self._free.setdefault(array.nbytes, []).append(array.view(np.uint8))

    def refer(self, array: HostArray, give_back: Callable[[], None]) -> None:
        """Note that `array`, this very object, is in somebody else's memory, who gets it back by `give`."""
        self._referred[id(array)] = (array, give_back)

    def own(self, array: HostArray) -> HostArray:
        """`array`, or a copy of it where it is another's."""
        if id(array) not in self._referred:
            return array
        copy = self.copy(array)
        self.give(array)
        return copy

    def combine(self, total: HostArray, other: HostArray, how: np.ufunc) -> HostArray:
        """`how(total, other)`, in the memory of `total` unless that is another's; both are given up."""
        out = total if id(total) not in self._referred else self.take(total.size, total.dtype)
        how(total, other, out=out)
        if out is not total:
            self.give(total)
        self.give(other)
        return out

    def join(self, arrays: Sequence[Any]) -> Any:
        """One array of all of them, one after another, in new memory."""
        joined = self.take(sum(array.size for array in arrays), arrays[0].dtype)
        at = 0
        for array in arrays:
            self._space.copy(joined[at : at + array.size], array)
            at += array.size
        return joined

    def trim(self) -> None:
        """Let go of everything that is free."""
        for n_bytes, free in self._free.items():
            self.held_bytes -= n_bytes * len(free)
            for array in free:
                if self._source is not None:
                    self._source.give(array)
        self._free.clear()


class ReadableMemory:
    """Values in memory that messages may read. give: takes the memory back."""

    __slots__ = ("_give", "_left", "array", "readers")

    def __init__(self, array: HostArray, give: Callable[[HostArray], None]) -> None:
        self.array = array
        self.readers = 0
        self._give = give
        self._left = False

    def leave(self) -> None:
        """The value lives elsewhere from now on; the memory is free once the last reader is done."""
        self._left = True
        if not self.readers:
            self._give(self.array)

    def release(self) -> None:
        """One reader is done."""
        self.readers -= 1
        if self._left and not self.readers:
            self._give(self.array)
