"""Counters of a host's ranks in shared memory, and how a rank waits for those of the others.

A table of words, with a row of whole cache lines for each rank, which that rank alone writes. Most words are counters:
they only increase, so that a rank that reads one late misses nothing. Other words describe what is counted: a rank
writes them before it counts, and the others read them after they have seen the count.

A rank that waits for a counter polls it, then yields its core between the polls (polling.py); a longer wait becomes a
request.

Cost: a cache line that moves to another core for each count that a rank there waits for; no message. Reading a word
takes 40 ns and calling a Python function 60, so loops that poll are written out where they are needed; `words` is for
those of common_calls.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpikv.engine.operation import Waiter, Waking
from mpikv.hostmemory.polling import NO_POLLING, Polling
from mpikv.hostmemory.segment import ORDERED, WORD_BYTES, HostMemory, aligned, fence


class Counted(Protocol):
    """What ranks count in: `Counters`, or the counters of one key."""

    def reached(self, rank: int, word: int, value: int) -> bool: ...

    def wakes(self, waiter: Waiter) -> bool: ...


class Reached(Waking):
    """A request that is done when all of these ranks have counted to `value` or beyond."""

    __slots__ = ("_counted", "_left", "_value", "_word")

    def __init__(self, counted: Counted, ranks: Sequence[int], word: int, value: int) -> None:
        self._counted, self._left, self._word, self._value = counted, list(ranks), word, value

    def test(self) -> bool:
        left, counted = self._left, self._counted
        while left and counted.reached(left[-1], self._word, self._value):
            left.pop()
        return not left

    def wakes(self, waiter: Waiter) -> bool:
        return self._counted.wakes(waiter)


def row_words(n_words: int) -> int:
    return aligned(n_words * WORD_BYTES) // WORD_BYTES


def table_bytes(n_ranks: int, n_words: int) -> int:
    return n_ranks * row_words(n_words) * WORD_BYTES


class Counters:
    """One rank's side of a table that begins at `begin_bytes`, a cache line; all words are 0 at the start.

    rank, size: among the ranks that count here; default: those of the memory. polling: how long a rank polls here.

    words: of all rows. rows: where each rank's row begins. others: all ranks except this one.
    """

    def __init__(
        self,
        memory: HostMemory,
        begin_bytes: int,
        n_words: int,
        *,
        rank: int | None = None,
        size: int | None = None,
        polling: Polling = NO_POLLING,
    ) -> None:
        self.rank = memory.rank if rank is None else rank
        self.size = memory.size if size is None else size
        self.polling = polling
        stride = row_words(n_words)
        self.words = memory.words(begin_bytes, self.size * stride)
        self.rows = range(0, self.size * stride, stride)
        self.others = [other for other in range(self.size) if other != self.rank]
        self._me = self.rows[self.rank]
        self._other_rows = [self.rows[other] for other in self.others]

    # --- this rank

    def count(self, word: int, value: int) -> None:
        """Set a counter of this rank. A rank that sees the new value also sees all that was written before."""
        if not ORDERED:
            fence()
        self.words[self._me + word] = value

    def write(self, word: int, value: int) -> None:
        """Write a word that is no counter, any 64 bits. The others may read it once this rank has counted."""
        self.words[self._me + word] = value

    # --- the others

    def of(self, rank: int, word: int) -> int:
        """Return a counter of a rank; what that rank has written before it counted can be read afterwards."""
        value: int = self.words[self.rows[rank] + word]
        if not ORDERED:
            fence()
        return value

    def read(self, rank: int, word: int) -> int:
        value: int = self.words[self.rows[rank] + word]
        return value

    def reached(self, rank: int, word: int, value: int) -> bool:
        return self.of(rank, word) >= value

    def awaited(self, word: int, value: int, *, soon: bool = True) -> Reached | None:
        """Poll until every rank has counted to `value`, then return None; where that takes long, return a request.

        soon: poll as long as `polling` says; False: return the request at once.
        """
        words = self.words
        for row in self._other_rows:
            index = row + word
            if words[index] >= value:
                continue
            if not soon:
                return Reached(self, self.others, word, value)
            for _ in self.polling.polls:
                if words[index] >= value:
                    break
            else:
                if not self.polling.yielded(lambda: words[index] >= value):  # noqa: B023 - called at once
                    return Reached(self, self.others, word, value)
        if not ORDERED:
            fence()
        return None

    def wakes(self, waiter: Waiter) -> bool:
        return False
