"""Values that come to where a collective reads them part by part, and results that go on part by part.

A collective that works on one segment after another says in which order it reads the values (`Parts.coming`), reads no
segment before it is counted as there, and tells which part of the result is complete (`Parts.landed`). So values of a
GPU can be copied to the host while the first of them are on their way to other ranks already, and sums be copied back
while the last are still to come (segments.py). Values of host memory are all there: `HERE`.

Cost: where all is there, nothing for each segment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.stages import Span, Stage, drive
from mpikv.engine.operation import Steps, Waiter

T = TypeVar("T")

Landed = Callable[[HostArray, Span], None]
"""Called with the array that a part of the result is in, and the part: this rank writes nothing there any more."""


class Coming(Stage, Protocol):
    """A stage that brings values. count: how many of the parts that were asked for are there, from the first on."""

    count: int


class Parts(Protocol):
    """Where the values of one rank come from, and where its results go."""

    @property
    def landed(self) -> Landed | None:
        """To be called with each part of the result; None: nobody wants to know."""
        ...

    def coming(self, spans: Iterable[Span]) -> Coming:
        """Begin to bring these parts of the values, in this order. They do not overlap."""
        ...


class _There:
    """All that is asked for."""

    done, count = True, sys.maxsize

    def move(self) -> bool:
        return False

    def wakes(self, waiter: Waiter) -> bool:
        return True


class _Here:
    """Values and results in the host's memory."""

    landed: Landed | None = None

    def __init__(self) -> None:
        self._there = _There()

    def coming(self, spans: Iterable[Span]) -> Coming:
        """Nothing has to come."""
        return self._there


HERE: Parts = _Here()


class Landing:
    """A stage that tells which of some parts of the result are complete. count: how many, from the first on, by now."""

    def __init__(self, parts: Parts, array: HostArray, spans: Sequence[Span], count: Callable[[], int]) -> None:
        self._landed, self._array, self._spans, self._count = parts.landed, array, spans, count
        self._told = 0
        self.done = self._landed is None or not spans

    def move(self) -> bool:
        """Tell of those that have been completed since."""
        told, count = self._told, self._count()
        if count <= told or self._landed is None:
            return False
        for span in self._spans[told:count]:
            self._landed(self._array, span)
        self._told = count
        self.done = count >= len(self._spans)
        return True

    def wakes(self, waiter: Waiter) -> bool:
        """Another stage has to move."""
        return True


def whole(parts: Parts, steps: Steps[T], array: HostArray, *, needed: Span, completed: Sequence[Span]) -> Steps[T]:
    """Let steps that read all of the values at once, in a collective that knows no parts, begin when they are there.

    array: which the steps complete the result in. completed: the parts of it that they do.
    """
    return steps if parts.landed is None else _whole(parts, steps, array, needed, completed)


def _whole(parts: Parts, steps: Steps[T], array: HostArray, needed: Span, completed: Sequence[Span]) -> Steps[T]:
    if needed[0] < needed[1]:
        yield from drive(parts.coming([needed]))
    result = yield from steps
    if parts.landed is not None:
        for span in completed:
            if span[0] < span[1]:
                parts.landed(array, span)
    return result
