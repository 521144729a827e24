"""What the ranks of one host share for one key: their values, the result, and counters of how far each rank has come.

A key has a place in the host's shared memory (hostmemory/segment): some counters for each rank, and the result once for
all. Values that the others cannot read where they are get copied into memory that the rank allocates from its own range
when it first needs it. A rank writes its own counters and values, and those elements of the result that it owns or
receives. A counter holds the number of the round and how much of it is done. So counters only grow, and a count of an
earlier or a later round is recognised as such.

Ranks need not acknowledge between rounds that they have read the shared memory. They read each other's values before
the result is complete, no rank ends a round before it is complete, and none of its elements changes until all ranks
have begun the next round. The same holds for the words that say where a rank's values are.

Other ranks read the digest of a rank's labels (placement/labels.py) until they end the round, and the rank may have
begun the next round by then. So each rank writes its digests to two words in turn. A word is safe to write again two
rounds later: the rank has then ended the round between, a round ends only after all ranks have begun it, and a rank
that has begun it has ended the one before, in which it read the word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Waiter
from mpikv.hostmemory.counters import Counters, Reached, table_bytes
from mpikv.hostmemory.segment import ALIGN_BYTES, HostMemory
from mpikv.placement.labels import Comparison

# The words of each rank. VALUES: where its values are. TOTALS: where it writes sums. DIGEST: the digest of its labels,
# in one word for even rounds and one for odd ones. The others are counters. REDUCED: segments of extra ranks' chunks
# (host_rings.py) that are added. UPDATED: 1 when an extra rank has updated its chunk. GATHERED: segments of its ring
# that are in the result. FILLED + ring: segments of its values that the ring's leader may read.
VALUES, TOTALS, DIGEST, _, REDUCED, UPDATED, GATHERED, FILLED = range(8)
ROUND_BITS = 32  # of a counter, for what is done in one round; the bits above hold the round's number
MAX_COUNT = (1 << ROUND_BITS) - 1


def counters_bytes(n_ranks: int) -> int:
    """Return how many bytes a key's words take on a host of `n_ranks`, with up to as many rings."""
    return table_bytes(n_ranks, FILLED + n_ranks)


class Place(NamedTuple):
    """Where a key's value and its counters begin, both at a cache line."""

    value_bytes: int
    counters_bytes: int


class HostKey:
    """One rank's side.

    dtypes: of the result, and of the sums. allocate(n_bytes): returns memory of this rank that the others can read.
    on_count: called whenever this rank has counted something, with the offset of the key's counters, which identifies
    the key. on_wait: called with this offset and a waiter; wakes the waiter when another rank has counted something;
    None: nothing wakes it.
    """

    def __init__(
        self,
        memory: HostMemory,
        place: Place,
        n_elems: int,
        dtypes: tuple[np.dtype[Any], np.dtype[Any]],
        n_rings: int,
        *,
        allocate: Callable[[int], HostArray],
        on_count: Callable[[int], None] = lambda _name: None,
        on_wait: Callable[[int, Waiter], None] | None = None,
    ) -> None:
        dtype, wire_dtype = dtypes
        assert place.value_bytes % ALIGN_BYTES == place.counters_bytes % ALIGN_BYTES == 0
        self._memory, self._n_elems, self._wire_dtype = memory, n_elems, wire_dtype
        self._counters = Counters(memory, place.counters_bytes, FILLED + n_rings)
        self.place = place
        self.value = memory.array(place.value_bytes, n_elems, dtype)
        self._allocate = allocate
        self._own: HostArray | None = None
        self._round = 0
        self._comparison: Comparison | None = None
        self._digest = 0  # that the others may read
        self._on_count, self._on_wait = on_count, on_wait

    @property
    def own(self) -> HostArray:
        """(n,), in the dtype of the sums: this rank's memory for values that the others cannot read where they are."""
        if self._own is None:
            n_bytes = self._n_elems * self._wire_dtype.itemsize
            self._own = self._allocate(n_bytes)[:n_bytes].view(self._wire_dtype)
        return self._own

    @property
    def held_bytes(self) -> int:
        """The size of `own` where it has been allocated; the result is not counted."""
        return 0 if self._own is None else self._own.nbytes

    # --- rounds

    def begin(self, values: HostArray, totals: HostArray, comparison: Comparison | None = None) -> None:
        """Begin the next round, and publish where this rank's values are and where it writes sums."""
        self._round += 1
        self._comparison = comparison
        if comparison is not None:
            self._write_digest(comparison.now)
        for word, array in ((VALUES, values), (TOTALS, totals)):
            self._counters.write(word, self._memory.offset_of(array) or 0)

    def _write_digest(self, digest: int) -> None:
        self._digest = digest
        self._counters.write(DIGEST + self._round % 2, digest)

    def is_shared(self, array: HostArray) -> bool:
        """Return whether the other ranks of the host can read this array."""
        return self._memory.offset_of(array) is not None

    def array_of(self, local_rank: int, word: int) -> HostArray:
        """Return the array that a rank has published, in the dtype of the sums, once it has counted in this round."""
        return self._memory.array(self._counters.read(local_rank, word), self._n_elems, self._wire_dtype)

    def count(self, word: int, done: int) -> None:
        """Set a counter to how much this rank has done in this round, and publish its digest where that has changed."""
        comparison = self._comparison
        if comparison is not None and comparison.now != self._digest:
            self._write_digest(comparison.now)
        self._counters.count(word, (self._round << ROUND_BITS) + done)
        self._on_count(self.place.counters_bytes)

    def counted(self, local_rank: int, word: int) -> int:
        """Return how much another rank has done in this round, and compare its digest where it has begun the round."""
        done = self._counters.of(local_rank, word) - (self._round << ROUND_BITS)
        if done > 0 and self._comparison is not None:
            self._comparison.compare(self._counters.read(local_rank, DIGEST + self._round % 2))
        return min(max(done, 0), MAX_COUNT)  # a counter of a later round gives MAX_COUNT

    def reached(self, local_rank: int, word: int, done: int) -> bool:
        """Return whether another rank has done at least so much of this round."""
        return self.counted(local_rank, word) >= done

    def awaited(self, local_ranks: Sequence[int], word: int, done: int) -> Reached:
        """Return a request that is done when these ranks have done at least so much of this round."""
        return Reached(self, local_ranks, word, done)

    def wakes(self, waiter: Waiter) -> bool:
        """Promise what `Waking.wakes` does: to wake `waiter` when another rank has counted something."""
        if self._on_wait is not None:
            self._on_wait(self.place.counters_bytes, waiter)
        return self._on_wait is not None
