"""Counters of a host's ranks in shared memory, and how a rank waits for those of the others.

A table of words, a row of whole cache lines for each rank, which it alone writes. Most words are counters: they only
increase, so that a rank that looks late misses nothing. A rank may also say something of what it counts, in words
beside; those it writes before it counts, and the others read them after they have seen the count.

Who waits for a counter polls and gives its core away (patience.py); what takes longer becomes a request.

Cost: a cache line that travels for each count that another rank looks for; no message. A look takes 40 ns and a call of
Python 60, so polls are written out; `words` is for those of other words (together.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpikv.engine.request import Waiter, Waking
from mpikv.hostmemory.patience import AT_ONCE, Patience
from mpikv.hostmemory.segment import ORDERED, WORD_BYTES, HostMemory, aligned, fence


class Counted(Protocol):
    """Where ranks count."""

    def reached(self, rank: int, word: int, value: int) -> bool:
        """Whether a rank has counted so far."""
        ...

    def wakes(self, waiter: Waiter) -> bool:
        """As `Waking.wakes`: when another rank has counted something."""
        ...


class Reached(Waking):
    """A request that is done when all of these ranks have counted so far."""

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

    rank, size: of those that count here, default those of the memory. patience: of those who wait here.

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
        patience: Patience = AT_ONCE,
    ) -> None:
        self.rank = memory.rank if rank is None else rank
        self.size = memory.size if size is None else size
        self.patience = patience
        stride = row_words(n_words)
        self.words = memory.words(begin_bytes, self.size * stride)
        self.rows = range(0, self.size * stride, stride)
        self.others = [other for other in range(self.size) if other != self.rank]
        self._me = self.rows[self.rank]
        self._other_rows = [self.rows[other] for other in self.others]

    # --- this rank

    def count(self, word: int, value: int) -> None:
        """Say that this rank has come so far; whoever sees that sees all that it has written before."""
        if not ORDERED:
            fence()
        self.words[self._me + word] = value

    def say(self, word: int, value: int) -> None:
        """Write a word that is no counter, any 64 bits. The others may rely on it once this rank has counted."""
        self.words[self._me + word] = value

    # --- the others

    def of(self, rank: int, word: int) -> int:
        """How far a rank has come; what it has written before can be read then."""
        value: int = self.words[self.rows[rank] + word]
        if not ORDERED:
            fence()
        return value

    def said(self, rank: int, word: int) -> int:
        """What a rank has written to a word that is no counter."""
        value: int = self.words[self.rows[rank] + word]
        return value

    def reached(self, rank: int, word: int, value: int) -> bool:
        """Whether a rank has come so far."""
        return self.of(rank, word) >= value

    def awaited(self, word: int, value: int, *, soon: bool = True) -> Reached | None:
        """None once every rank has come so far. Where that takes long: a request that is done when they have.

        soon: wait as patiently as this table is made for; else the request is returned at once.
        """
        words = self.words
        for row in self._other_rows:
            index = row + word
            if words[index] >= value:
                continue
            if not soon:
                return Reached(self, self.others, word, value)
            for _ in self.patience.polls:
                if words[index] >= value:
                    break
            else:
                if not self.patience.yielded(lambda: words[index] >= value):  # noqa: B023 - called at once
                    return Reached(self, self.others, word, value)
        if not ORDERED:
            fence()
        return None

    def wakes(self, waiter: Waiter) -> bool:
        """As `Waking.wakes`: a count in memory wakes nobody."""
        return False
