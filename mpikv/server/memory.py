"""The server's memory: arrays that are used again, and values that messages still read.

A gradient of 64 MiB that comes in new memory each round costs as much in page faults as in the adding. So partitions
come into arrays that were used before, the last one first, which the cache may still hold.

A reply is sent straight from the value's own memory. Until it has left, the value must not change: `Block` counts its
readers, and an update that comes too early goes into a copy.

Cost: what is free stays held, `Pool.held_bytes` in all; it never grows beyond what was in use at one time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv.arrays import HostArray


class Pool:
    """Arrays by their size. held_bytes: all that this pool ever made and still has, in use or free."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._free: dict[int, list[HostArray]] = {}

    def take(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """An array (n_elems,) of any content."""
        n_bytes = n_elems * dtype.itemsize
        free = self._free.get(n_bytes)
        if free:
            return free.pop().view(dtype)
        self.held_bytes += n_bytes
        return np.empty(n_elems, dtype)

    def give(self, array: HostArray) -> None:
        """Give back an array that nobody uses any more: one that `take` returned, or an equal of it."""
        self._free.setdefault(array.nbytes, []).append(array.view(np.uint8))

    def lose(self, array: HostArray) -> None:
        """An array of this pool's that somebody else may keep."""
        self.held_bytes -= array.nbytes

    def trim(self) -> None:
        """Let go of everything that is free."""
        self.held_bytes -= sum(n_bytes * len(free) for n_bytes, free in self._free.items())
        self._free.clear()


class Block:
    """Values in memory that messages may read."""

    __slots__ = ("_left", "_pool", "array", "readers")

    def __init__(self, array: HostArray, pool: Pool) -> None:
        self.array = array
        self.readers = 0
        self._pool = pool
        self._left = False

    def leave(self) -> None:
        """The value lives elsewhere from now on; the memory is free once the last reader is done."""
        self._left = True
        if not self.readers:
            self._pool.give(self.array)

    def release(self) -> None:
        """One reader is done."""
        self.readers -= 1
        if self._left and not self.readers:
            self._pool.give(self.array)
