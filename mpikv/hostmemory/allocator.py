"""An allocator for each rank's own range of the memory that a host's ranks share.

The ranges lie behind what all ranks use in common, and all have the same length, so a rank allocates without asking the
others. Only pages that were written to take memory of the machine. Memory that is given back takes none, and is used
again when the same size is needed.
"""

from __future__ import annotations

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.hostmemory.segment import HostMemory, MemoryRange

PAGE_BYTES = 4096


class Allocator:
    """Allocates from this rank's range. taken_bytes: what has been taken from it and not given back."""

    def __init__(self, memory: HostMemory, begin_bytes: int) -> None:
        begin_bytes = -(-begin_bytes // PAGE_BYTES) * PAGE_BYTES
        length = max(0, memory.n_bytes - begin_bytes) // memory.size // PAGE_BYTES * PAGE_BYTES
        self._memory = memory
        begin = begin_bytes + memory.rank * length
        self._region = MemoryRange(begin, begin + length)
        self._free: dict[int, list[HostArray]] = {}
        self.taken_bytes = 0

    def take(self, n_bytes: int) -> HostArray | None:
        free = self._free.get(n_bytes)
        if free:
            self.taken_bytes += n_bytes
            array = free.pop()
            array.fill(0)  # `discard` keeps the pages at both ends, which other arrays may share
            return array
        begin = self._region.reserve(n_bytes)
        if begin is None:
            return None
        array = self._memory.array(begin, n_bytes, np.dtype(np.uint8))
        self.taken_bytes += n_bytes
        return array

    def give(self, array: HostArray) -> None:
        if self._memory.offset_of(array) is None:
            return
        self.taken_bytes -= array.size
        self._memory.discard(array)
        self._free.setdefault(array.size, []).append(array)
