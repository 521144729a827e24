"""Counters of a host's ranks in shared memory, and how a rank waits for those of the others.

A table of words, with a row of whole cache lines for each rank, which that rank alone writes. Most words are counters:
they only increase, so that a rank that looks late misses nothing. Other words hold something about what is counted: a
rank writes them before it counts, and the others read them after they have seen the count.

A rank that waits for a counter polls and gives its core away (polling.py); a longer wait becomes a request.

Cost: a cache line that moves to another core for each count that a rank there waits for; no message. A look takes 40 ns
and a call of a Python function 60, so loops that poll are written out where they are needed; `words` is for those of
common_calls.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpikv.engine.operation import Waiter, Waking
from mpikv.hostmemory.polling import NO_POLLING, Polling
from mpikv.hostmemory.segment import ORDERED, WORD_BYTES, HostMemory, aligned, fence


class Counted(Protocol):
    """A place where ranks count: `Counters`, or the counters of one key."""

    def reached(self, rank: int, word: int, value: int) -> bool:
        """Whether a rank has come so far."""
        ...

    def wakes(self, waiter: Waiter) -> bool:
        """As `Waking.wakes`: when another rank has counted something."""
        ...


class Reached(Waking):
    """A request that is done when all of these ranks have come so far."""

    __slots__ = ("_counted", "_left", "_value", "_word")

    def __init__(self, counted: Counted, ranks: Sequence[int], word: int, value: int) -> None:
        self._counted, self._left, self._word, self._value = counted, list(ranks), word, value

    def test(self) -> bool:
        """Whether they have."""
        left, counted = self._left, self._counted
        while left and counted.reached(left[-1], self._word, self._value):
            left.pop()
        return not left

    def wakes(self, waiter: Waiter) -> bool:
        """When another rank has counted something."""
        return self._counted.wakes(waiter)


def row_words(n_words: int) -> int:
    """How long a row of so many words is."""
    return aligned(n_words * WORD_BYTES) // WORD_BYTES


def table_bytes(n_ranks: int, n_words: int) -> int:
    """What a table takes."""
    return n_ranks * row_words(n_words) * WORD_BYTES


class Counters:
    """One rank's side of a table that begins at `begin_bytes`, a cache line; zeros at the start.

    rank, size: of those that count here, default those of the memory. polling: how a rank waits here.

    words: of all rows. rows: where each rank's begins. others: the ranks but this one.
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
        """Write how far this rank has come. A rank that sees it also sees all that was written before."""
        if not ORDERED:
            fence()
        self.words[self._me + word] = value

    def say(self, word: int, value: int) -> None:
        """Write a word that is no counter, any 64 bits. The others may read it once this rank has counted."""
        self.words[self._me + word] = value

    # --- the others

    def of(self, rank: int, word: int) -> int:
        """Return how far a rank has come; what it has written before can be read then."""
        value: int = self.words[self.rows[rank] + word]
        if not ORDERED:
            fence()
        return value

    def said(self, rank: int, word: int) -> int:
        """Return what a rank has written to a word that is no counter."""
        value: int = self.words[self.rows[rank] + word]
        return value

    def reached(self, rank: int, word: int, value: int) -> bool:
        """Whether a rank has come so far."""
        return self.of(rank, word) >= value

    def awaited(self, word: int, value: int, *, soon: bool = True) -> Reached | None:
        """Wait until every rank has come so far, and return None; where that takes long, return a request for it.

        soon: wait as long as `polling` says; else the request is returned at once.
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
        """As `Waking.wakes`: False, since nobody is woken by a count in memory."""
        return False
