"""Keys and arrays in the memory of each host.

It has three parts of the same length. The first begins with the counters and slots of the direct path, and the table of
the device memory that ranks read of each other (spaces/peers); then come the values of the keys, and blocks for arrays
of `store.empty`, in which every worker has a part of the same length. The second holds the keys' counters
(collectives/host_key), behind a word that says that the key's first value is there.
Worker 0 gives places in these two out, the same on every host, one behind the other; the others learn them when they
agree on a key or an array. Nothing is ever given back. The third is cut into parts, one for each worker, for values
that the others are to read.

No message calls a worker that waits for another of its host. So each worker keeps a log, a ring of words: the key that
it has counted something of, each time, and how many entries it has made in all. The progress engine reads the new
entries of the others in each of its steps, and wakes who waits for these keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.collectives.host_key import Arrays, HostKey, Place, counters_bytes
from mpikv.collectives.shared import WORDS
from mpikv.collectives.shared_plans import Slots
from mpikv.engine.operation import Done, Operation, Steps, Waiter, Waking
from mpikv.errors import MpikvError
from mpikv.hostmemory.allocator import Allocator
from mpikv.hostmemory.counters import Counters, table_bytes
from mpikv.hostmemory.segment import ALIGN_BYTES, ORDERED, WORD_BYTES, HostMemory, MemoryRange, aligned, fence
from mpikv.placement.topology import topology
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.peers import Peers
from mpikv.spaces.peers import table_bytes as peers_bytes

LOG_ENTRIES = 1024
LAG = LOG_ENTRIES // 2  # who falls behind by more wakes all who wait
LENGTH, ENTRIES = 0, ALIGN_BYTES // WORD_BYTES  # words: the number of entries, in a cache line of its own, and they
LOG_WORDS = ENTRIES + LOG_ENTRIES


class ArrayBlock(NamedTuple):
    """Worker r's part begins at `begin + r * stride`, workers counted on their host."""

    begin: int
    stride: int


class _Published(Waking):
    """A request that is done when a key's first value is at its place."""

    __slots__ = ("_hosts", "_place")

    def __init__(self, hosts: HostKeys, place: Sequence[int]) -> None:
        self._hosts, self._place = hosts, place

    def test(self) -> bool:
        """Whether it is."""
        return self._hosts.is_published(self._place)

    def wakes(self, waiter: Waiter) -> bool:
        """When rank 0 has published it."""
        self._hosts.wait(self._place[1], waiter)
        return True


class HostKeys:
    """One worker's view of its host's memory. A request that is never done: it wakes whoever has something to do.

    hosts: of each worker. space: the device memory of this worker that the others of its host read; None: they do not.
    peers: what they read there of each other.
    """

    def __init__(self, memory: HostMemory, hosts: Sequence[str], space: DeviceSpace | None = None) -> None:
        found = topology(hosts)
        self.memory = memory
        self.rank = memory.rank
        self.size = memory.size
        self._n_rings = found.n_leaders
        self._most = max(len(ranks) for ranks in found.hosts)
        words_begin = table_bytes(self._most, WORDS)
        self._log = Counters(memory, words_begin, LOG_WORDS)
        self._read = dict.fromkeys(self._log.others, 0)  # entries of each
        begin = words_begin + table_bytes(self._most, LOG_WORDS)
        self.slots = None
        if len(found.hosts) == 1:
            self.slots = Slots(memory, begin)
            begin = self.slots.end
        self.peers: Peers | None = None
        if space is not None:
            self.peers = Peers(space, memory, begin)
            begin += peers_bytes(self._most)
        third = memory.n_bytes // 3 // ALIGN_BYTES * ALIGN_BYTES
        self._values = MemoryRange(begin, third)  # kept by worker 0 alone
        self._counters = MemoryRange(third, 2 * third)  # likewise
        self._own_part = Allocator(memory, 2 * third)
        self._blocks: list[ArrayBlock] = []
        self._waiting: dict[int, Waiter] = {}  # by where the key's counters are
        self._words = memory.words(0, memory.n_bytes // WORD_BYTES)

    # --- places

    def reserve_key(self, n_bytes: int, *, pages: bool = False) -> Place | None:
        """At worker 0: where a key is on every host. None when the smallest memory is full.

        pages: whole pages for the key alone, which can be locked.
        """
        value = self._values.reserve(n_bytes, pages=pages)
        # In front of the counters a word, in a cache line of its own, that says whether the first value is there.
        counters = None if value is None else self._counters.reserve(ALIGN_BYTES + counters_bytes(self._most))
        return None if value is None or counters is None else Place(value, counters + ALIGN_BYTES)

    def reserve_arrays(self, n_bytes: int) -> int | None:
        """The same for `n_bytes` of each worker."""
        return self._values.reserve(aligned(n_bytes) * self._most)

    def value(self, place: Sequence[int], n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """The value of a key at its place: (n_elems,)."""
        return self.memory.array(place[0], n_elems, dtype)

    def key(
        self,
        place: Sequence[int],
        n_elems: int,
        dtype: np.dtype[Any],
        *,
        pages: bool = False,
        value: Any = None,
        arrays: Arrays | None = None,
    ) -> HostKey:
        """What rounds of a key at its place need. pages: what they take of this worker's part is of whole pages.

        value, arrays: of a key in device memory, see `HostKey`.
        """
        return HostKey(
            self.memory,
            Place(*place),
            n_elems,
            (dtype, sum_dtype(dtype)),
            self._n_rings,
            allocate=partial(self.room, pages=pages),
            value=value,
            arrays=arrays,
            on_count=self._count,
            on_wait=self.wait,
        )

    def close(self) -> Operation:
        """Let go of the others' device memory. A request that is done when they have let go of this rank's.

        Collective; whoever frees device memory has to wait for it.
        """
        return Done() if self.peers is None else self.peers.close()

    def room(self, n_bytes: int, *, pages: bool = False) -> HostArray:
        """(n_bytes,) of uint8 in this worker's part, which the others can read. MpikvError where it is full."""
        room = self._own_part.take(n_bytes, pages=pages)
        if room is None:
            raise MpikvError(
                f"no room for {n_bytes} bytes more in this worker's part of the host's memory: "
                "MPIKV_SHARED_MEMORY=off does without it"
            )
        return room

    def array(self, begin: int, n_bytes: int) -> HostArray:
        """This worker's part of a block that all have agreed on: (n_bytes,) of uint8."""
        stride = aligned(n_bytes)
        self._blocks.append(ArrayBlock(begin, stride))
        return self.memory.array(begin + self.rank * stride, n_bytes, np.dtype(np.uint8))

    def replicas(self, array: HostArray) -> list[HostArray] | None:
        """The same place in every worker's part of a block, in rank order, where `array` lies in this worker's."""
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
        """Replicas of two arrays as those of one, where the second begins at the first one's end."""
        mine = self.memory.offset_of(first[self.rank])
        behind = self.memory.offset_of(second[self.rank])
        if mine is None or behind is None or first[0].dtype != second[0].dtype or mine + first[0].nbytes != behind:
            return None
        if self._block_at(mine, first[0].nbytes + second[0].nbytes) is None:
            return None  # the end of one block and the beginning of the next
        n_elems = first[0].size + second[0].size
        return [self.memory.array(self.memory.offset_of(one) or 0, n_elems, one.dtype) for one in first]

    # --- first values

    def publish(self, place: Sequence[int]) -> None:
        """Say to the others of the host that the key's first value is at its place."""
        if not ORDERED:
            fence()
        self._words[(place[1] - ALIGN_BYTES) // WORD_BYTES] = 1
        self._count(place[1])

    def is_published(self, place: Sequence[int]) -> bool:
        """Whether a rank of the host has said so."""
        there = self._words[(place[1] - ALIGN_BYTES) // WORD_BYTES] == 1
        if not ORDERED:
            fence()
        return there

    def published(self, place: Sequence[int]) -> Operation:
        """A request that is done when one has."""
        return _Published(self, place)

    # --- waking

    def wait(self, name: int, waiter: Waiter) -> None:
        """Wake `waiter` when another rank has counted something of the key with this name: where its counters are."""
        self._waiting[name] = waiter

    def _count(self, name: int) -> None:
        entries = self._log.of(self.rank, LENGTH)
        self._log.write(ENTRIES + entries % LOG_ENTRIES, name)
        self._log.count(LENGTH, entries + 1)

    def listen(self) -> Steps[None]:
        """For the progress engine: look in each of its steps."""
        while True:
            yield self

    def test(self) -> bool:
        """Wake the transfers of keys that somebody has counted for. Never done."""
        log = self._log
        for rank, read in self._read.items():
            entries = log.of(rank, LENGTH)
            if entries == read:
                continue
            self._read[rank] = entries
            names: Sequence[int] = ()
            if entries - read < LAG:
                names = [log.read(rank, ENTRIES + at % LOG_ENTRIES) for at in range(read, entries)]
            if not names or log.of(rank, LENGTH) - read > LOG_ENTRIES:  # some may have been written over
                names = [*self._waiting]
            for name in names:
                waiter = self._waiting.pop(name, None)
                if waiter is not None:
                    waiter.wake()
        return False
