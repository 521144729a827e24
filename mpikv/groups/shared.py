"""The collectives of a group whose ranks share a host's memory, without a message.

A call is a list of chunks, each of which goes through three steps on every rank (collectives/shared.py): each copies
into its slot the values that the others need (fill), combines its own range of all slots into its array and its slot
(sum), and copies the results of the others out of their slots (drain).

Chunks are numbered through all calls of the group, and each rank counts how many it has filled, summed and drained, in
words that all ranks read. So a rank may be ahead of the others by as many chunks as there are slots, even in the next
call. With its first chunk a rank writes a digest of its call: where digests differ, all ranks raise, and the next call
can be made.

Cost per rank of an allreduce, n elements, p ranks: n(p-1)/p copied in, n/p combined over all ranks, n copied out; up to
TINY_BYTES each rank combines all elements by itself, and waits once. Memory: SLOTS chunks per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import Reduction
from mpikv.collectives.shared import Chunk, ChunkWords, Sum, copy_all, run_chunks, summed
from mpikv.collectives.shared_plans import CHUNK_BYTES, TINY_BYTES, range_of
from mpikv.engine.operation import Steps
from mpikv.errors import MpikvError
from mpikv.hostmemory.counters import Counters, table_bytes
from mpikv.hostmemory.polling import Polling
from mpikv.hostmemory.segment import ALIGN_BYTES, HostMemory, aligned

SLOTS = 4  # one is filled, one summed and one drained; the fourth lets a rank be ahead
# The words of each rank: three counters, each in a cache line of its own, and two digests.
FILLED, SUMMED, DRAINED, DIGEST = 0, 8, 16, 24
WORDS = DIGEST + 2
CHUNK_WORDS = ChunkWords(FILLED, SUMMED, DRAINED, SLOTS)


def region_bytes(size: int) -> int:
    """Return how many bytes of the host's memory a group of `size` ranks takes."""
    return aligned(table_bytes(size, WORDS) + size * SLOTS * CHUNK_BYTES)


class MismatchError(MpikvError):
    """Ranks of a group made different calls under the same number."""


class SharedCalls:
    """One rank's side. begin_bytes: where the group's region begins in `memory`; rank, size: in the group."""

    def __init__(self, memory: HostMemory, begin_bytes: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._memory = memory
        polling = Polling.of(memory, size)
        self._counters = Counters(memory, begin_bytes, WORDS, rank=rank, size=size, polling=polling)
        self._slots_begin = begin_bytes + table_bytes(size, WORDS)
        self._calls = 0
        self._chunks = 0  # of all calls before the one under way

    def _slot(self, rank: int, chunk: int, dtype: np.dtype[Any], n_elems: int, offset_bytes: int = 0) -> HostArray:
        """Return some elements of a rank's slot for chunk number `chunk` of the next call, from an offset on."""
        slot = (self._chunks + chunk) % SLOTS
        begin = self._slots_begin + (rank * SLOTS + slot) * CHUNK_BYTES + offset_bytes
        return self._memory.array(begin, n_elems, dtype)

    def _slots(self, chunk: int, like: HostArray, offset_bytes: int = 0) -> list[HostArray]:
        """Return room for an array like this in each rank's slot."""
        return [self._slot(rank, chunk, like.dtype, like.size, offset_bytes) for rank in range(self.size)]

    # --- running a call

    def run(self, digest: int, plan: Callable[[], Sequence[Chunk]]) -> Steps[None]:
        """Run one call, once the one before has ended. plan: returns its chunks, equally many on every rank. Raises
        MismatchError on all ranks where digests differ, and changes no array then.
        """
        chunks, counters, first = plan() or [Chunk()], self._counters, self._chunks
        word = DIGEST + self._calls % 2  # in turn, since another rank may still read the digest of the call before
        self._calls += 1
        counters.write(word, digest)
        if (request := counters.awaited(DRAINED, first - SLOTS + 1)) is not None:
            yield request
        copy_all(chunks[0].fills)
        counters.count(FILLED, first + 1)
        if (request := counters.awaited(FILLED, first + 1, soon=False)) is not None:  # some may not be in this call yet
            yield request
        for row in counters.rows:
            if counters.words[row + word] != digest:
                raise self._mismatch(digest, word)
        yield from run_chunks(counters, CHUNK_WORDS, chunks, first)
        self._chunks += len(chunks)

    def _mismatch(self, digest: int, word: int) -> MismatchError:
        """Count a call that ranks do not make alike as if it had one chunk, and return its error."""
        self._chunks += 1
        self._counters.count(SUMMED, self._chunks)
        self._counters.count(DRAINED, self._chunks)
        different = [rank for rank in range(self.size) if self._counters.read(rank, word) != digest]
        return MismatchError(
            f"rank {', '.join(map(str, different))} of the group made another call than rank {self.rank}, or "
            "brought other shapes, dtypes or options: every rank of a group makes the same calls in the same order"
        )

    def discard(self) -> None:
        """Give the memory of this rank's slots back, unless another rank may still read them."""
        mine = self._counters.of(self.rank, FILLED)
        if not all(self._counters.reached(rank, DRAINED, mine) for rank in range(self.size)):
            return
        begin = self._slots_begin + self.rank * SLOTS * CHUNK_BYTES
        self._memory.discard(self._memory.array(begin, SLOTS * CHUNK_BYTES, np.dtype(np.uint8)))

    # --- plans. Arrays are flat and contiguous.

    def allreduce(self, arrays: Sequence[HostArray], operator: Reduction) -> list[Chunk]:
        return [self._allreduce(operator, i, values) for i, values in _views(arrays)]

    def _allreduce(self, operator: Reduction, i: int, values: HostArray) -> Chunk:
        chunk, slots = Chunk(), self._slots(i, values)
        if values.nbytes <= TINY_BYTES:
            chunk.fills.append(slots[self.rank], values)
            chunk.sums.append(summed(values, slots, op=operator))
            return chunk
        for rank in range(self.size):
            begin, end = range_of(rank, self.size, values.size, values.itemsize)
            if begin < end and rank == self.rank:
                part = values[begin:end]
                chunk.sums.append(self._sum([slot[begin:end] for slot in slots], part, part, operator))
            elif begin < end:
                chunk.fills.append(slots[self.rank][begin:end], values[begin:end])
                chunk.drains.append(values[begin:end], slots[rank][begin:end])
        return chunk

    def _sum(self, slots: Sequence[HostArray], mine: HostArray, out: HostArray, operator: Reduction) -> Sum:
        """Combine this rank's values and what is in the others' slots. The result is built up in this rank's slot, not
        in `out`, which may be one of the sources.
        """
        sources = [mine if rank == self.rank else slots[rank] for rank in range(self.size)]
        return summed(slots[self.rank], sources, [out], op=operator)

    def reduce(self, values: HostArray, out: HostArray, operator: Reduction, root: int) -> list[Chunk]:
        chunks = []
        for i, span in enumerate(_slices(values)):
            chunk, mine, slots = Chunk(), values[span], self._slots(i, values[span])
            if self.rank != root:
                chunk.fills.append(slots[self.rank], mine)
            else:
                chunk.sums.append(self._sum(slots, mine, out[span], operator))
            chunks.append(chunk)
        return chunks

    def broadcast(self, arrays: Sequence[HostArray], root: int) -> list[Chunk]:
        chunks = []
        for i, values in _views(arrays):
            chunks.append(Chunk())
            slot = self._slot(root, i, values.dtype, values.size)
            if self.rank == root:
                chunks[i].fills.append(slot, values)
            else:
                chunks[i].drains.append(values, slot)
        return chunks

    def allgather(self, pairs: Sequence[tuple[HostArray, Sequence[HostArray]]]) -> list[Chunk]:
        chunks: list[Chunk] = []
        for values, outs in pairs:
            before = len(chunks)
            for rank, out in enumerate(outs):
                for i, span in enumerate(_slices(out), before):
                    if i == len(chunks):
                        chunks.append(Chunk())
                    slot = self._slot(rank, i, out.dtype, span.stop - span.start)
                    if rank == self.rank:
                        chunks[i].fills.append(slot, values[span])
                        chunks[i].fills.append(out[span], values[span])
                    else:
                        chunks[i].drains.append(out[span], slot)
        return chunks

    def reduce_scatter(
        self, pairs: Sequence[tuple[Sequence[HostArray], HostArray]], operator: Reduction
    ) -> list[Chunk]:
        share_bytes = CHUNK_BYTES // self.size // ALIGN_BYTES * ALIGN_BYTES
        chunks: list[Chunk] = []
        for arrays, out in pairs:
            before = len(chunks)
            for dest, values in enumerate(arrays):
                for i, span in enumerate(_slices(values, share_bytes), before):
                    if i == len(chunks):
                        chunks.append(Chunk())
                    mine = values[span]
                    slots = self._slots(i, mine, dest * share_bytes)
                    if dest != self.rank:
                        chunks[i].fills.append(slots[self.rank], mine)
                    else:
                        chunks[i].sums.append(self._sum(slots, mine, out[span], operator))
        return chunks


def _slices(array: HostArray, slice_bytes: int = CHUNK_BYTES) -> list[slice]:
    """Return slices of at most `slice_bytes` that make up an array."""
    step = slice_bytes // array.itemsize
    return [slice(begin, min(begin + step, array.size)) for begin in range(0, array.size, step)]


def _views(arrays: Sequence[HostArray]) -> Iterator[tuple[int, HostArray]]:
    return enumerate(array[span] for array in arrays for span in _slices(array))
