"""The server's memory: a pool of arrays that are used again, and values that messages still read.

If a gradient of 64 MiB were received into new memory in each round, page faults would take as long as adding it. So
partitions are received into arrays that were used before, the last one first, which the cache may still hold.

A reply is sent straight from the value's own memory. Until it has been sent, the value must not change:
`ReadableMemory` counts the messages that read it, and an update that comes earlier is written to a copy.

On a host whose workers share memory with the server all arrays are in that memory, and pushes are used by reference: a
push stays in its worker's memory until it has been added, and nothing is ever written there.

Free arrays are kept, `Pool.held_bytes` in all; that never grows beyond what was in use at one time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.hostmemory.allocator import Allocator
from mpikv.spaces.base import Space


class Pool:
    """Arrays by their size. source: allocates their memory, where other ranks are to read it.

    held_bytes: of all arrays that it has made and not freed, in use or not.
    """

    def __init__(self, source: Allocator | None, space: Space) -> None:
        self.held_bytes, self._space, self._source = 0, space, source
        self._free: dict[int, list[HostArray]] = {}
        self._referred: dict[int, tuple[HostArray, Callable[[], None]]] = {}  # by the array's id

    def take(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        n_bytes = n_elems * dtype.itemsize
        free = self._free.get(n_bytes)
        if free:
            return free.pop().view(dtype)
        self.held_bytes += n_bytes
        array = None if self._source is None else self._source.take(n_bytes)
        return self._space.empty(n_elems, dtype) if array is None else array.view(dtype)

    def copy(self, values: HostArray) -> HostArray:
        array = self.take(values.size, values.dtype)
        self._space.copy(array, values)
        return array

    def give(self, array: HostArray) -> None:
        """Give back an array that is not used any more: one of `take`, another one like it, or one of `refer`."""
        referred = self._referred.pop(id(array), None) if self._referred else None
        if referred is not None:
            referred[1]()
        else:
            self._free.setdefault(array.nbytes, []).append(array.view(np.uint8))

    def refer(self, array: HostArray, give_back: Callable[[], None]) -> None:
        """Register an array object in another rank's memory. `give` of this object then calls `give_back`."""
        self._referred[id(array)] = (array, give_back)

    def own(self, array: HostArray) -> HostArray:
        if id(array) not in self._referred:
            return array
        copy = self.copy(array)
        self.give(array)
        return copy

    def combine(self, total: HostArray, other: HostArray, how: np.ufunc) -> HostArray:
        """`how(total, other)`, in the memory of `total` unless that is another rank's; both are given back."""
        out = total if id(total) not in self._referred else self.take(total.size, total.dtype)
        how(total, other, out=out)
        if out is not total:
            self.give(total)
        self.give(other)
        return out

    def trim(self) -> None:
        for n_bytes, free in self._free.items():
            self.held_bytes -= n_bytes * len(free)
            for array in free:
                if self._source is not None:
                    self._source.give(array)
        self._free.clear()


class ReadableMemory:
    """Values in memory that messages may read. give: takes the memory back."""

    __slots__ = ("_give", "_retired", "array", "readers")

    def __init__(self, array: HostArray, give: Callable[[HostArray], None]) -> None:
        self.array, self.readers = array, 0
        self._give, self._retired = give, False

    def retire(self) -> None:
        """Give the memory back once the last reader is done: the value is in other memory from now on."""
        self._retired = True
        if not self.readers:
            self._give(self.array)

    def release(self) -> None:
        self.readers -= 1
        if self._retired and not self.readers:
            self._give(self.array)
