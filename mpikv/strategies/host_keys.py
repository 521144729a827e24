"""Keys and arrays in the shared memory of each host.

The memory has three ranges of equal length. The first begins with the counters and slots of the direct path. Behind
them are the keys' values, and blocks for arrays of `store.empty`, which have a range of the same length for every
worker. The second has the keys' counters (collectives/host_key). Worker 0 allocates in these two ranges, one key or
block after another, at the same offsets on every host; the others get the offsets when they agree on a key or an array.
Nothing is ever freed. The third is divided among the workers, for values that the others of the host read.

A worker gets no message when another of its host changes a counter that it waits for. So each worker keeps a log in
shared memory: a ring buffer with an entry for each counter that it has changed, and the number of all entries so far.
An entry names a key by the offset of its counters. In each of its steps the progress engine reads the new entries of
the other workers, and wakes the transfers that wait for these keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.collectives.host_key import GATHERED, HostKey, Place, counters_bytes
from mpikv.collectives.shared import WORDS
from mpikv.collectives.shared_plans import Slots
from mpikv.engine.operation import Steps, Waiter
from mpikv.errors import MpikvError
from mpikv.hostmemory.allocator import Allocator
from mpikv.hostmemory.counters import Counters, table_bytes
from mpikv.hostmemory.segment import ALIGN_BYTES, ORDERED, WORD_BYTES, HostMemory, MemoryRange, aligned, fence
from mpikv.placement.topology import topology

LOG_ENTRIES = 1024
MOST_UNREAD = LOG_ENTRIES // 2  # a worker that has more entries to read wakes all waiting transfers instead
LENGTH, ENTRIES = 0, ALIGN_BYTES // WORD_BYTES  # words: the number of entries, in its own cache line, and the entries
LOG_WORDS = ENTRIES + LOG_ENTRIES


class ArrayBlock(NamedTuple):
    """A block of arrays. Worker r's array begins at `begin + r * stride`; workers are counted on their host."""

    begin: int
    stride: int


class HostKeys:
    """One worker's view of its host's memory. As a request it is never done: its `test` wakes waiting transfers."""

    def __init__(self, memory: HostMemory, hosts: Sequence[str]) -> None:
        found = topology(hosts)
        self.memory, self.rank, self.size = memory, memory.rank, memory.size
        self._n_rings = found.n_leaders
        self._most_ranks = max(len(ranks) for ranks in found.hosts)
        words_begin = table_bytes(self._most_ranks, WORDS)
        self._log = Counters(memory, words_begin, LOG_WORDS)
        self._n_read = dict.fromkeys(self._log.others, 0)  # entries of each
        begin = words_begin + table_bytes(self._most_ranks, LOG_WORDS)
        self.slots = None
        if len(found.hosts) == 1:
            self.slots = Slots(memory, begin)
            begin = self.slots.end
        third = memory.n_bytes // 3 // ALIGN_BYTES * ALIGN_BYTES
        self._values = MemoryRange(begin, third)  # used by worker 0 only
        self._counters = MemoryRange(third, 2 * third)  # likewise
        self._own_memory = Allocator(memory, 2 * third)
        self._blocks: list[ArrayBlock] = []
        self._waiting: dict[int, Waiter] = {}  # by the offset of the key's counters
        self._words = memory.words(0, memory.n_bytes // WORD_BYTES)

    # --- places

    def reserve_key(self, n_bytes: int) -> Place | None:
        """Allocate the place of a key, on every host, at worker 0. None when the memory is full on one of them."""
        value = self._values.reserve(n_bytes)
        counters = None if value is None else self._counters.reserve(counters_bytes(self._most_ranks))
        return None if value is None or counters is None else Place(value, counters)

    def reserve_arrays(self, n_bytes: int) -> int | None:
        """Allocate a block of `n_bytes` for each worker. Returns its offset; None as in `reserve_key`."""
        return self._values.reserve(aligned(n_bytes) * self._most_ranks)

    def value(self, place: Sequence[int], n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        return self.memory.array(place[0], n_elems, dtype)

    def key(self, place: Sequence[int], n_elems: int, dtype: np.dtype[Any]) -> HostKey:
        """Make what the rounds of a key at `place` need."""
        return HostKey(
            self.memory,
            Place(*place),
            n_elems,
            (dtype, sum_dtype(dtype)),
            self._n_rings,
            allocate=self.allocate,
            on_count=self._count,
            on_wait=self.wait,
        )

    def allocate(self, n_bytes: int) -> HostArray:
        """Allocate (n_bytes,) of uint8 in this worker's range, which the others can read. MpikvError if it is full."""
        memory = self._own_memory.take(n_bytes)
        if memory is None:
            raise MpikvError(
                f"no room for {n_bytes} bytes more in this worker's part of the host's memory: "
                "MPIKV_SHARED_MEMORY=off does without it"
            )
        return memory

    def array(self, begin: int, n_bytes: int) -> HostArray:
        """This worker's array in a block that all workers have agreed on: (n_bytes,) of uint8."""
        stride = aligned(n_bytes)
        self._blocks.append(ArrayBlock(begin, stride))
        return self.memory.array(begin + self.rank * stride, n_bytes, np.dtype(np.uint8))

    def replicas(self, array: HostArray) -> list[HostArray] | None:
        """The arrays of all workers, in rank order, at the same position of a block; None if `array` is in no block."""
        if not self._blocks:
            return None
        offset = self.memory.offset_of(array)
        block = None if offset is None else self._block_at(offset, array.nbytes)
        if offset is None or block is None:
            return None
        return [
            self.memory.array(offset + (rank - self.rank) * block.stride, array.size, array.dtype)
            for rank in range(self.size)
        ]

    def _block_at(self, offset: int, n_bytes: int) -> ArrayBlock | None:
        for block in self._blocks:
            mine = block.begin + self.rank * block.stride
            if mine <= offset and offset + n_bytes <= mine + block.stride:
                return block
        return None

    def join(self, first: list[HostArray], second: list[HostArray]) -> list[HostArray] | None:
        """Join the replicas of two arrays if the second begins where the first ends; else None."""
        mine = self.memory.offset_of(first[self.rank])
        behind = self.memory.offset_of(second[self.rank])
        if mine is None or behind is None or first[0].dtype != second[0].dtype or mine + first[0].nbytes != behind:
            return None
        if self._block_at(mine, first[0].nbytes + second[0].nbytes) is None:
            return None  # the end of one block and the beginning of the next
        n_elems = first[0].size + second[0].size
        return [self.memory.array(self.memory.offset_of(one) or 0, n_elems, one.dtype) for one in first]

    # --- first values: `GATHERED` of the host's first worker, before the first round. Many keys need no `HostKey`.

    def publish(self, place: Sequence[int]) -> None:
        """Count, as the first worker, that the key's first value has been written to its place."""
        if not ORDERED:
            fence()
        self._words[place[1] // WORD_BYTES + GATHERED] = 1
        self._count(place[1])

    def is_published(self, place: Sequence[int]) -> bool:
        there = self._words[place[1] // WORD_BYTES + GATHERED] > 0
        if not ORDERED:
            fence()
        return there

    # --- waking

    def wait(self, name: int, waiter: Waiter) -> None:
        """Wake `waiter` when another rank has changed a counter of a key. name: the offset of the key's counters."""
        self._waiting[name] = waiter

    def _count(self, name: int) -> None:
        entries = self._log.of(self.rank, LENGTH)
        self._log.write(ENTRIES + entries % LOG_ENTRIES, name)
        self._log.count(LENGTH, entries + 1)

    def listen(self) -> Steps[None]:
        """For the progress engine, which then calls `test` in each of its steps."""
        while True:
            yield self

    def test(self) -> bool:
        """Wake the transfers of keys of which another rank has changed a counter."""
        log = self._log
        for rank, read in self._n_read.items():
            entries = log.of(rank, LENGTH)
            if entries == read:
                continue
            self._n_read[rank] = entries
            names: Sequence[int] = ()
            if entries - read < MOST_UNREAD:
                names = [log.read(rank, ENTRIES + at % LOG_ENTRIES) for at in range(read, entries)]
            if not names or log.of(rank, LENGTH) - read > LOG_ENTRIES:  # some may have been written over
                names = [*self._waiting]
            for name in names:
                waiter = self._waiting.pop(name, None)
                if waiter is not None:
                    waiter.wake()
        return False
