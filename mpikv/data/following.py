"""How an iteration of a sampler goes on when workers have died, or spares have come: what is left is split anew.

When workers come together each tells how far it is. As much as the furthest has drawn of its part, the others draw of
theirs, too; what comes behind that in the epoch's order is split over those that are there. So nobody draws what
another one has drawn. Cost: no message of its own; at each split what an iteration's begin costs.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpikv.data.split import SplitSampler


class _Iteration(NamedTuple):
    """Where a worker is in its n-th iteration. start: of the first split. splits: the numbers of the workers of each
    earlier one, and how many examples each worker has drawn of it. numbers: of the workers of the present one. drawn:
    how many examples this worker has drawn, of which its program has had some. of: what tells the sampler from others.
    """

    n: int = 0
    epoch: int = 0
    start: int = 0
    splits: Sequence[Any] = ()
    numbers: Sequence[int] = ()
    drawn: int = 0
    had: int = 0
    of: Sequence[Any] = ()


class Following:
    """The iterations of one worker's sampler. All workers make it, under one name; one that a spare makes before its
    first step is that of the others with the same examples. had: how many examples of the present iteration the program
    has had; None: all that were drawn.
    """

    def __init__(self, sampler: SplitSampler, session: Any) -> None:
        self._sampler, self._session = weakref.ref(sampler), session
        self._parts = copy.copy(sampler)  # gives the parts of the present iteration
        self._lock = threading.Lock()  # drawing may be of another thread
        self._numbers = [*session.coming]
        self._iteration = _Iteration(of=[sampler.length, sampler.seed, sampler.shuffle, sampler.last])
        self._next: _Iteration | None = None  # which others have begun before workers have gone
        self._mine: NDArray[np.int64] = np.empty(0, np.int64)  # what this iteration gives
        self._drawn = 0  # how many of them it has given
        self.had: int | None = None
        theirs = [(_Iteration(*one), name) for told in session.told for name, one in told.items() if one]
        theirs = [one for one in theirs if session.has_come and one[0].of == self._iteration.of]
        self._name = max(theirs, key=lambda one: (one[0].epoch, one[0].n))[1] if theirs else session.new_sampler()
        session.tells[self._name] = self._tell
        session.on_change.append(self._changed)
        weakref.finalize(sampler, self._forget).atexit = False
        self._changed()

    def _forget(self) -> None:
        if self._session.tells.get(self._name) == self._tell:
            del self._session.tells[self._name]
        self._session.on_change.remove(self._changed)

    def _tell(self) -> _Iteration | None:
        with self._lock:
            had = self._drawn if self.had is None else self.had
            return None if self._session.alone else self._iteration._replace(drawn=self._drawn, had=had)

    def _changed(self) -> None:
        """Others have come or gone, and all have told where they are."""
        numbers, told = [*self._session.coming], [one[self._name] for one in self._session.told if one.get(self._name)]
        if (sampler := self._sampler()) is not None:
            sampler.num_parts, sampler.part_index = len(numbers), numbers.index(self._session.number)
        with self._lock:
            before, self._numbers = self._numbers, numbers
            last = max((_Iteration(*one) for one in told), key=lambda one: (one.n, one.drawn), default=_Iteration())
            if not last.n or (numbers == before and last.n == self._iteration.n):
                return
            if last.numbers != numbers:
                n = last.drawn - sum(n for _, n in last.splits)
                last = last._replace(splits=[*last.splits, [last.numbers, n]], numbers=numbers)
            if last.n == self._iteration.n:
                self._go_on(last)
            else:
                self._next = last if self._session.has_come else last._replace(had=0)

    def _go_on(self, iteration: _Iteration) -> None:
        """Take the examples of this worker's parts in an iteration, of which all have drawn the same number."""
        parts, mine = self._parts, list[NDArray[np.int64]]()
        parts.epoch, parts.start = iteration.epoch, iteration.start
        for numbers, n in [*iteration.splits, (iteration.numbers, None)]:
            parts.num_parts, parts.part_index = len(numbers), numbers.index(self._session.number)
            mine.append(parts.indices()[:n])
            parts.start = min(parts.start + len(numbers) * (n or 0), parts.length)
        self._iteration, self._mine = iteration, np.concatenate(mine)

    def begin(self, sampler: SplitSampler, had: int = 0) -> int:
        """Begin an iteration, or go on in one. had: how many examples of it the program has had already.

        Returns how many it has: as many as the others where it has just taken a place.
        """
        with self._lock:
            there, self.had = self._next, None
            if there is not None and there.had and not self._session.has_come:
                there = None  # of an epoch that had ended before this worker came
            if there is not None and there.had and sampler.epoch < there.epoch:  # the others have ended this epoch
                self._mine, self._drawn = np.empty(0, np.int64), 0
                return had
            n = self._iteration.n + 1
            if there is None or (sampler.epoch != there.epoch and there.n != n):
                there = _Iteration(n, sampler.epoch, sampler.start, [], self._numbers, of=self._iteration.of)
            self._next, self._drawn = None, max(had, there.had)
            self._go_on(there)
            return self._drawn

    def draw(self) -> int | None:
        """The next example of the iteration that has begun; None: there is no more."""
        with self._lock:
            if self._drawn >= len(self._mine):
                return None
            self._drawn += 1
            return int(self._mine[self._drawn - 1])

    def drawing(self, sampler: SplitSampler) -> Iterator[int]:
        self.begin(sampler)
        yield from iter(self.draw, None)

    def place(self, epoch: int, had: int) -> dict[str, int]:
        """What the state of a loader says of where it is when its loop has had so many examples of an epoch. Local."""
        before = len(self._mine) - len(self._parts)  # of earlier splits
        if self._iteration.epoch != epoch or before < 0:
            return {}
        start = self._parts.start + self._parts.num_parts * max(0, had - before)
        return {"start": min(start, self._parts.length), "batches": 0} if before else {"start": self._parts.start}
