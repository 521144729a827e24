"""Who has which part of the memory that a host's workers share.

Behind the counters and the slots of the direct way lies the arena: a place for the value of each key, and blocks for
arrays of `store.empty`, in which every worker has a part of the same length. Worker 0 gives places out, one behind the
other, and the others learn them when they agree on the key or the array. Nothing is ever given back.
"""

from __future__ import annotations

from typing import NamedTuple

from mpikv.arrays import HostArray
from mpikv.collectives.shared_plans import Slots
from mpikv.hostmemory.segment import HostMemory, Space
from mpikv.keys import KeyInfo


class Block(NamedTuple):
    """Worker r's part begins at `begin + r * stride`."""

    begin: int
    stride: int


class Arena:
    """The memory as one worker sees it."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.rank = memory.rank
        self.size = memory.size
        self.slots = Slots(memory)
        self._space = Space(self.slots.end, memory.n_bytes)  # kept by worker 0 alone
        self._blocks: list[Block] = []

    def reserve(self, n_bytes: int) -> int | None:
        """At worker 0: where the next `n_bytes` are. None when the memory is full."""
        return self._space.reserve(n_bytes)

    def add_block(self, begin: int, stride: int) -> int:
        """Note what `store.empty` agreed on; returns where this worker's part begins."""
        self._blocks.append(Block(begin, stride))
        return begin + self.rank * stride

    def value(self, offset_bytes: int, info: KeyInfo) -> HostArray:
        """The place of a key's value."""
        return self.memory.array(offset_bytes, info.n_elems, info.dtype)

    def replicas(self, array: HostArray) -> list[HostArray] | None:
        """The same place in every worker's part of a block, in rank order, where `array` lies in this worker's."""
        offset = self.memory.offset_of(array)
        block = None if offset is None else self._block_at(offset, array.nbytes)
        if offset is None or block is None:
            return None
        return [
            self.memory.array(offset + (rank - self.rank) * block.stride, array.size, array.dtype)
            for rank in range(self.size)
        ]

    def _block_at(self, offset: int, n_bytes: int) -> Block | None:
        for block in self._blocks:
            mine = block.begin + self.rank * block.stride
            if mine <= offset and offset + n_bytes <= mine + block.stride:
                return block
        return None

    def join(self, first: list[HostArray], second: list[HostArray]) -> list[HostArray] | None:
        """Replicas of two arrays as those of one, where the second begins at the first one's end."""
        mine = self.memory.offset_of(first[self.rank])
        behind = self.memory.offset_of(second[self.rank])
        if mine is None or behind is None or first[0].dtype != second[0].dtype or mine + first[0].nbytes != behind:
            return None
        if self._block_at(mine, first[0].nbytes + second[0].nbytes) is None:
            return None  # the end of one block and the beginning of the next
        n_elems = first[0].size + second[0].size
        return [self.memory.array(self.memory.offset_of(one) or 0, n_elems, one.dtype) for one in first]
