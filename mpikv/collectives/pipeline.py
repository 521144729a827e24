"""A pipeline loads values while a collective runs on them, and takes parts of the result away before it has ended.

A collective that works on one segment after another asks for its values in the order in which it reads them
(`Pipeline.load`), reads no segment before the loader has counted it, and calls `Pipeline.on_complete` with each part of
the result that is complete. So values of a GPU can be copied to the host while the first of them are on their way to
other ranks already, and sums can be copied back while the last ones are still to come (segments.py). Values in host
memory need no pipeline: `NO_PIPELINE`.

Cost without a pipeline: nothing for each segment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.stages import Span, Stage, drive
from mpikv.engine.operation import Steps, Waiter

T = TypeVar("T")

OnComplete = Callable[[HostArray, Span], None]
"""Called with the array that holds the result and a span of it that is complete: this rank writes there no more."""


class Loader(Stage, Protocol):
    """A stage that loads values. count: how many of the spans that it was made for, from the first on, are loaded."""

    count: int


class Pipeline(Protocol):
    """Loads the values of one rank, and takes its results."""

    @property
    def on_complete(self) -> OnComplete | None:
        """To be called with each part of the result; None: there is no pipeline, and all values are there."""
        ...

    def load(self, spans: Iterable[Span]) -> Loader:
        """Begin to load these spans of the values, in this order. They do not overlap."""
        ...


class _AllLoaded:
    """A loader of values that are all there."""

    done, count = True, sys.maxsize

    def move(self) -> bool:
        return False

    def wakes(self, waiter: Waiter) -> bool:
        return True


class _NoPipeline:
    """For values and results in the host's memory."""

    on_complete: OnComplete | None = None

    def __init__(self) -> None:
        self._all_loaded = _AllLoaded()

    def load(self, spans: Iterable[Span]) -> Loader:
        """Return a loader that has nothing to do."""
        return self._all_loaded


NO_PIPELINE: Pipeline = _NoPipeline()


class CompletionReporter:
    """A stage that calls `on_complete` with each of `spans`. count: returns how many, from the first on, are done."""

    def __init__(self, pipeline: Pipeline, array: HostArray, spans: Sequence[Span], count: Callable[[], int]) -> None:
        self._on_complete, self._array, self._spans, self._count = pipeline.on_complete, array, spans, count
        self._reported = 0
        self.done = self._on_complete is None or not spans

    def move(self) -> bool:
        """Report those that have been completed since."""
        reported, count = self._reported, self._count()
        if count <= reported or self._on_complete is None:
            return False
        for span in self._spans[reported:count]:
            self._on_complete(self._array, span)
        self._reported = count
        self.done = count >= len(self._spans)
        return True

    def wakes(self, waiter: Waiter) -> bool:
        """Return True: only another stage's move can give this one something to do."""
        return True


def load_first(
    pipeline: Pipeline, steps: Steps[T], array: HostArray, *, needed: Span, completed: Sequence[Span]
) -> Steps[T]:
    """Load all values before `steps`, and report the result after them: for collectives that know no segments.

    needed: the values that the steps read. array: holds the result, whose spans `completed` the steps complete.
    """
    return steps if pipeline.on_complete is None else _load_first(pipeline, steps, array, needed, completed)


def _load_first(
    pipeline: Pipeline, steps: Steps[T], array: HostArray, needed: Span, completed: Sequence[Span]
) -> Steps[T]:
    if needed[0] < needed[1]:
        yield from drive(pipeline.load([needed]))
    result = yield from steps
    if pipeline.on_complete is not None:
        for span in completed:
            if span[0] < span[1]:
                pipeline.on_complete(array, span)
    return result
