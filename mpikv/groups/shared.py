"""The collectives of a group whose ranks share a host's memory, without a message.

A call is a list of *chunks*. Each rank has slots in the memory, one for a chunk; three things happen to a chunk:

- fill: each rank copies into its slot what the others need of it;
- combine: each rank reads the others' slots, and writes what it has combined to its own array and into its slot;
- drain: each rank copies out of the others' slots what they have combined.

Chunks are numbered through all calls of the group, and each rank counts in words that all see how many it has filled,
combined and drained. So a rank may be ahead of the others by as many chunks as there are slots, also into the next
call. With its first chunk a rank shows a digest of its call: where they differ, all ranks raise.

Cost per rank of an allreduce, n elements, p ranks: n(p-1)/p copied in, n combined over all ranks in parts of n/p, n
copied out; up to TINY_BYTES each rank combines everything by itself, and waits once. Memory: SLOTS chunks per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.shared_plans import part_of
from mpikv.engine.request import Steps
from mpikv.errors import MpikvError
from mpikv.groups.operators import Operator
from mpikv.hostmemory.counters import Counters, table_bytes
from mpikv.hostmemory.patience import Patience
from mpikv.hostmemory.segment import ALIGN_BYTES, HostMemory, aligned

CHUNK_BYTES = 512 << 10  # as a store's (collectives/shared_plans.py)
SLOTS = 4  # one is filled, one combined and one drained; the fourth lets a rank be ahead
TINY_BYTES = 16 << 10  # combining this much p times costs less than waiting for it

FILLED, COMBINED, DRAINED, DIGEST = 0, 8, 16, 24  # each counter in a cache line of its own; two digests
WORDS = DIGEST + 2

Action = Callable[[], None]


@dataclass
class Chunk:
    """What one rank does for one chunk."""

    fills: list[Action] = field(default_factory=list)
    combines: list[Action] = field(default_factory=list)
    drains: list[Action] = field(default_factory=list)


def region_bytes(size: int) -> int:
    """What a group of so many ranks takes of the host's memory."""
    return aligned(table_bytes(size, WORDS) + size * SLOTS * CHUNK_BYTES)


class MismatchError(MpikvError):
    """Ranks of a group made different calls at the same place in their order."""


def _copy(destination: HostArray, source: HostArray) -> Action:
    return partial(np.copyto, destination, source)


class SharedCalls:
    """One rank's side. begin_bytes: where the group's region begins in `memory`; rank, size: in the group."""

    def __init__(self, memory: HostMemory, begin_bytes: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._memory = memory
        patience = Patience.of(memory, size)
        self._counters = Counters(memory, begin_bytes, WORDS, rank=rank, size=size, patience=patience)
        self._slots_begin = begin_bytes + table_bytes(size, WORDS)
        self._calls = 0
        self._chunks = 0  # of all calls before the one under way

    def _slot(self, rank: int, chunk: int, dtype: np.dtype[Any], offset_bytes: int = 0) -> HostArray:
        """What is left of a rank's slot for chunk number `chunk` of the next call, from an offset on."""
        slot = (self._chunks + chunk) % SLOTS
        begin = self._slots_begin + (rank * SLOTS + slot) * CHUNK_BYTES + offset_bytes
        return self._memory.array(begin, (CHUNK_BYTES - offset_bytes) // dtype.itemsize, dtype)

    # --- the order of things

    def run(self, digest: int, plan: Callable[[], Sequence[Chunk]]) -> Steps[None]:
        """Make one call. plan: makes the chunks, as many on every rank. The call before must have ended.

        Raises MismatchError, on all ranks, where their digests differ.
        """
        chunks = plan() or [Chunk()]
        first, n = self._chunks, len(chunks)
        place = DIGEST + self._calls % 2  # a rank that still reads the digest of the call before is not overwritten
        self._counters.say(place, digest)
        for i in range(n + 2):
            if i < n:
                yield from self._until(DRAINED, first + i - SLOTS + 1)
                self._do(chunks[i].fills, FILLED, first + i + 1)
            if 0 < i <= n:
                if i == 1 or chunks[i - 1].combines:
                    yield from self._until(FILLED, first + i, soon=i > 1)
                if i == 1:
                    self._compare(digest, place)
                self._do(chunks[i - 1].combines, COMBINED, first + i)
            if i > 1:
                if chunks[i - 2].drains:
                    yield from self._until(COMBINED, first + i - 1)
                self._do(chunks[i - 2].drains, DRAINED, first + i - 1)
        self._chunks += n
        self._calls += 1

    def _do(self, actions: Sequence[Action], word: int, count: int) -> None:
        for action in actions:
            action()
        self._counters.count(word, count)

    def _until(self, word: int, count: int, *, soon: bool = True) -> Steps[None]:
        """Wait until every rank has counted so far. soon: all are in this call, so it will not take long."""
        request = self._counters.awaited(word, count, soon=soon)
        if request is not None:
            yield request

    def _compare(self, digest: int, place: int) -> None:
        different = [rank for rank in range(self.size) if self._counters.said(rank, place) != digest]
        if different:
            raise MismatchError(
                f"rank {', '.join(map(str, different))} of the group made another call than rank {self.rank}, or "
                "brought other shapes, dtypes or options: every rank of a group makes the same calls in the same order"
            )

    def discard(self) -> None:
        """Let go of this rank's slots, unless another rank may still read them."""
        mine = self._counters.of(self.rank, FILLED)
        if not all(self._counters.reached(rank, DRAINED, mine) for rank in range(self.size)):
            return
        begin = self._slots_begin + self.rank * SLOTS * CHUNK_BYTES
        self._memory.discard(self._memory.array(begin, SLOTS * CHUNK_BYTES, np.dtype(np.uint8)))

    # --- plans. Arrays are flat and contiguous.

    def allreduce(self, arrays: Sequence[HostArray], operator: Operator) -> list[Chunk]:
        """Combine each array over all ranks, in place."""
        return self._chunked(arrays, partial(self._allreduce, operator))

    def _allreduce(self, operator: Operator, i: int, values: HostArray) -> Chunk:
        way = operator.way(values.dtype)
        slots = [self._slot(rank, i, values.dtype)[: values.size] for rank in range(self.size)]
        if values.nbytes <= TINY_BYTES:
            fills = [_copy(slots[self.rank], values)]
            return Chunk(fills, [partial(way, values, slots)])
        parts = [slice(*part_of(rank, self.size, values.size, values.itemsize)) for rank in range(self.size)]
        own = parts[self.rank]
        sources = [values[own] if rank == self.rank else slots[rank][own] for rank in range(self.size)]
        chunk = Chunk()
        for rank, part in enumerate(parts):
            if part.start == part.stop:
                continue
            if rank == self.rank:
                # A temporary result in the cache, and not in `values`, which is a source.
                chunk.combines += [partial(way, slots[rank][part], sources), _copy(values[part], slots[rank][part])]
            else:
                chunk.fills.append(_copy(slots[self.rank][part], values[part]))
                chunk.drains.append(_copy(values[part], slots[rank][part]))
        return chunk

    def reduce(self, values: HostArray, out: HostArray, operator: Operator, root: int) -> list[Chunk]:
        """Combine `values` over all ranks into the root's `out`."""
        chunks, way = [], operator.way(values.dtype)
        for i, part in enumerate(_parts(values)):
            slots = [self._slot(rank, i, values.dtype)[: part.stop - part.start] for rank in range(self.size)]
            if self.rank != root:
                chunks.append(Chunk([_copy(slots[self.rank], values[part])]))
                continue
            sources = [values[part] if rank == root else slots[rank] for rank in range(self.size)]
            temporary = partial(way, slots[root], sources)
            chunks.append(Chunk([], [temporary, _copy(out[part], slots[root])]))
        return chunks

    def broadcast(self, arrays: Sequence[HostArray], root: int) -> list[Chunk]:
        """Copy the root's arrays to all ranks."""
        return self._chunked(arrays, partial(self._broadcast, root))

    def _broadcast(self, root: int, i: int, values: HostArray) -> Chunk:
        slot = self._slot(root, i, values.dtype)[: values.size]
        if self.rank == root:
            return Chunk([_copy(slot, values)])
        return Chunk(drains=[_copy(values, slot)])

    def allgather(self, values: HostArray, outs: Sequence[HostArray]) -> list[Chunk]:
        """Copy every rank's values to every rank. outs: one for each rank, as long as that rank's values."""
        chunks: list[Chunk] = []
        for rank, out in enumerate(outs):
            for i, part in enumerate(_parts(out)):
                if i == len(chunks):
                    chunks.append(Chunk())
                slot = self._slot(rank, i, out.dtype)[: part.stop - part.start]
                if rank == self.rank:
                    chunks[i].fills += [_copy(slot, values[part]), _copy(out[part], values[part])]
                else:
                    chunks[i].drains.append(_copy(out[part], slot))
        return chunks

    def reduce_scatter(self, parts: Sequence[HostArray], out: HostArray, operator: Operator) -> list[Chunk]:
        """`out` becomes part number `rank` of every rank, combined. parts: one for each rank."""
        room, way = CHUNK_BYTES // self.size // ALIGN_BYTES * ALIGN_BYTES, operator.way(out.dtype)
        chunks: list[Chunk] = []
        for dest, values in enumerate(parts):
            for i, part in enumerate(_parts(values, room)):
                if i == len(chunks):
                    chunks.append(Chunk())
                n = part.stop - part.start
                slots = [self._slot(rank, i, values.dtype, dest * room)[:n] for rank in range(self.size)]
                if dest != self.rank:
                    chunks[i].fills.append(_copy(slots[self.rank], values[part]))
                    continue
                sources = [values[part] if rank == dest else slots[rank] for rank in range(self.size)]
                chunks[i].combines += [partial(way, slots[dest], sources), _copy(out[part], slots[dest])]
        return chunks

    def _chunked(self, arrays: Sequence[HostArray], plan: Callable[[int, HostArray], Chunk]) -> list[Chunk]:
        pieces = [array[part] for array in arrays for part in _parts(array)]
        return [plan(i, piece) for i, piece in enumerate(pieces)]


def _parts(array: HostArray, room_bytes: int = CHUNK_BYTES) -> list[slice]:
    """Slices of at most so many bytes."""
    step = room_bytes // array.itemsize
    return [slice(begin, min(begin + step, array.size)) for begin in range(0, array.size, step)]
