"""What the ranks of one host share of one key: what each has to add, the result, and how far each has come.

A place in the memory of the host (hostmemory/segment): some counters for each rank, and the result once for all. Values
that the others cannot read where they are go into the rank's own part of that memory, from which it takes room when it
first needs it. A rank writes its own counters and values, and of the result what it owns or receives. Counters hold the
number of the round and how much of it is done, so they only grow, and one that is behind or ahead is told from one that
counts this round. Of a key in device memory only the counters are in the memory of the host; each rank has a copy of
the result, and names it and its values to the others (spaces/peers).

Nothing has to be given back between rounds. Ranks read each other's values before the result is complete, nobody ends
a round before it is complete, and none of its elements changes until all ranks have begun the next round. The same
holds for where a rank's values are.

Other ranks read the digest of a rank's labels (placement/labels.py) until they end the round, and the rank may have
begun the next one by then. So each rank has two words for it, and uses them by turns. A word is safe to write again two
rounds later: the rank has then ended the round between, a round ends only after all ranks have begun it, and a rank
that has begun it has ended the one before, in which it read the word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Waiter
from mpikv.hostmemory.counters import Counters, Reached, table_bytes
from mpikv.hostmemory.segment import ALIGN_BYTES, HostMemory
from mpikv.placement.labels import Comparison

# Words of each rank. Where its values are, and where it adds up, and DIGEST, what it says of the labels, for even and
# for odd rounds. Then counters: segments of the further ranks' chunks that are added up; that a further rank has
# updated its chunk; segments of its ring that are in the result; and from FILLED on, for each ring, segments that its
# carrier may read.
VALUES, TOTALS, DIGEST, _, REDUCED, UPDATED, GATHERED, FILLED = range(8)
ROUND_BITS = 32  # a round's count stays below
MOST = (1 << ROUND_BITS) - 1


def counters_bytes(n_ranks: int) -> int:
    """What the counters of a key take on a host of `n_ranks`, of which some or all are carriers."""
    return table_bytes(n_ranks, FILLED + n_ranks)


class Place(NamedTuple):
    """Where a key's value and its counters begin, both at a cache line."""

    value_bytes: int
    counters_bytes: int


class Arrays(Protocol):
    """How the ranks of a host name arrays to each other."""

    def word_of(self, array: Any) -> int | None:
        """The name, a word, of an array of this rank; None where the others cannot read it."""
        ...

    def array_of(self, place: int, word: int, n_elems: int, dtype: np.dtype[Any]) -> Any:
        """The array that the rank at this place has named."""
        ...


class InHostMemory:
    """Arrays in the memory that the ranks share: named by where they begin."""

    def __init__(self, memory: HostMemory) -> None:
        self.word_of, self._array = memory.offset_of, memory.array

    def array_of(self, place: int, word: int, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """The array at this offset, whoever has named it."""
        return self._array(word, n_elems, dtype)


class HostKey:
    """One rank's side.

    dtypes: of the result, and the one that values are added in. room(n_bytes): memory of this rank's that the others
    can read. value: this rank's copy of the result, and arrays: how ranks name what others read; None: the result is at
    its place, once for all, and they read in the memory of the host. on_count: called whenever this rank has counted
    something, with the key's name: where its counters begin. on_wait: called with this name and who waits until another
    rank has counted something, and then wakes that; None: nobody does.
    """

    def __init__(
        self,
        memory: HostMemory,
        place: Place,
        n_elems: int,
        dtypes: tuple[np.dtype[Any], np.dtype[Any]],
        n_rings: int,
        *,
        room: Callable[[int], HostArray],
        value: Any = None,
        arrays: Arrays | None = None,
        on_count: Callable[[int], None] = lambda _name: None,
        on_wait: Callable[[int, Waiter], None] | None = None,
    ) -> None:
        dtype, wire_dtype = dtypes
        assert place.value_bytes % ALIGN_BYTES == place.counters_bytes % ALIGN_BYTES == 0
        self._arrays: Arrays = InHostMemory(memory) if arrays is None else arrays
        self._n_elems, self._wire_dtype = n_elems, wire_dtype
        self._counters = Counters(memory, place.counters_bytes, FILLED + n_rings)
        self.place = place
        self.value: Any = memory.array(place.value_bytes, n_elems, dtype) if value is None else value
        self._room = room
        self._own: HostArray | None = None
        self._round = 0
        self._comparison: Comparison | None = None
        self._digest = 0  # as the others may read it
        self._on_count, self._on_wait = on_count, on_wait

    @property
    def own(self) -> HostArray:
        """(n,), in the dtype of the sums: where this rank copies values that are not in shared memory anyway."""
        if self._own is None:
            n_bytes = self._n_elems * self._wire_dtype.itemsize
            self._own = self._room(n_bytes)[:n_bytes].view(self._wire_dtype)
        return self._own

    @property
    def held_bytes(self) -> int:
        """What this rank has written values to, for the others; the result is not counted."""
        return 0 if self._own is None else self._own.nbytes

    # --- rounds

    def begin(self, values: Any, totals: Any, comparison: Comparison | None = None) -> None:
        """The next round begins: where this rank's values are, and where it adds up, as far as others read there."""
        self._round += 1
        self._comparison = comparison
        if comparison is not None:
            self._say_digest(comparison.now)
        self.name(VALUES, values)
        self.name(TOTALS, totals)

    def name(self, word: int, array: Any) -> None:
        """Say where an array of this rank's is, as far as others read there."""
        self._counters.write(word, self._arrays.word_of(array) or 0)

    def _say_digest(self, digest: int) -> None:
        self._digest = digest
        self._counters.write(DIGEST + self._round % 2, digest)

    def is_shared(self, array: HostArray) -> bool:
        """Whether the other ranks of the host can read this array."""
        return self._arrays.word_of(array) is not None

    def array_of(self, place: int, word: int, dtype: np.dtype[Any] | None = None) -> Any:
        """The array that a rank named; after it has counted something in this round. dtype: default that of sums."""
        dtype = self._wire_dtype if dtype is None else dtype
        return self._arrays.array_of(place, self._counters.read(place, word), self._n_elems, dtype)

    def count(self, word: int, done: int) -> None:
        """Say how much this rank has done in this round, and what it knows of the labels by now."""
        comparison = self._comparison
        if comparison is not None and comparison.now != self._digest:
            self._say_digest(comparison.now)
        self._counters.count(word, (self._round << ROUND_BITS) + done)
        self._on_count(self.place.counters_bytes)

    def counted(self, place: int, word: int) -> int:
        """How much another rank has done in this round. What it says of the labels is compared then."""
        done = self._counters.of(place, word) - (self._round << ROUND_BITS)
        if done > 0 and self._comparison is not None:
            self._comparison.compare(self._counters.read(place, DIGEST + self._round % 2))
        return min(max(done, 0), MOST)  # the most: it is in a later round

    def reached(self, place: int, word: int, done: int) -> bool:
        """Whether another rank has done so much of this round."""
        return self.counted(place, word) >= done

    def awaited(self, places: Sequence[int], word: int, done: int) -> Reached:
        """A request that is done when these ranks have done so much of this round."""
        return Reached(self, places, word, done)

    def wakes(self, waiter: Waiter) -> bool:
        """As `Waking.wakes`: when another rank has counted something."""
        if self._on_wait is not None:
            self._on_wait(self.place.counters_bytes, waiter)
        return self._on_wait is not None
