"""Sums through memory that the ranks of a host share.

All ranks are in the same call (see hostmemory/together). A call is a *plan*: a list of chunks, each small enough for
the cache. Three things happen to a chunk, one after another, and to three chunks at a time, so that ranks seldom wait:

- fill: each rank copies its values into its slot of shared memory, where the others do not see them anyway;
- sum: each rank adds its own part over all ranks, in the order of the ranks, so that the bits are those of `naive`;
- drain: each rank copies the result out to its arrays.

Arrays that lie in shared memory need neither fill nor drain: each rank adds its part in place, into the array of the
first rank, and copies it to the others.

Cost per rank, n elements, p ranks: n(p-1)/p copied in, n(p-1)/p added, n copied out; in place n(p-1)/p added and
n(p-1)/p copied. Two waits per chunk, one for values of up to 16 KiB, which every rank adds by itself. No message.
Scratch: three chunks per rank. Restrictions: one host. Plans are made in shared_plans.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import setitem
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.hostmemory.counters import Counters, Reached
from mpikv.hostmemory.sums import Way, way_of
from mpikv.hostmemory.together import FREE

SMALL_BYTES = 4 << 10  # copies up to this are made through memoryviews, which start in a third of the time

MANY = 8  # copies from which on a loop in C pays

Copy = tuple[Any, Any]  # destination and source: two arrays or two memoryviews
WHOLE = slice(None)
Wait = Callable[[Reached], None]

FILLED, SUMMED = FREE, FREE + 1  # counters of chunks
WORDS = FREE + 2  # of the decision on calls, and of their steps


class Sum(NamedTuple):
    """`out` becomes what `way` makes of `sources`; then it is copied to `copies`, then `after` is called."""

    out: HostArray
    sources: tuple[HostArray, ...]
    copies: tuple[HostArray, ...]
    after: Callable[[], None] | None
    way: Way


def summed(
    out: HostArray,
    sources: Sequence[HostArray],
    copies: Sequence[HostArray] = (),
    after: Callable[[], None] | None = None,
    op: Reduction = SUM,
) -> Sum:
    """A `Sum`, or what another reduction makes of one array of each rank."""
    way = way_of(sources[0].dtype, op.combine, op.finish if op.is_mean else None)
    return Sum(out, tuple(sources), tuple(copies), after, way)


class Copies:
    """Copies to be made one after another."""

    __slots__ = ("destinations", "sources")

    def __init__(self) -> None:
        self.destinations: list[Any] = []
        self.sources: list[Any] = []

    def add(self, copies: Iterable[Copy]) -> None:
        """Some more."""
        for destination, source in copies:
            self.destinations.append(destination)
            self.sources.append(source)

    def __iter__(self) -> Iterator[Copy]:
        return zip(self.destinations, self.sources, strict=True)

    @property
    def n_bytes(self) -> int:
        """What they copy."""
        return sum(destination.nbytes for destination in self.destinations)


@dataclass
class Chunk:
    """What one rank does for one chunk."""

    fills: Copies = field(default_factory=Copies)
    sums: list[Sum] = field(default_factory=list)
    drains: Copies = field(default_factory=Copies)


@dataclass
class Plan:
    """What one rank does in one call, and what it costs."""

    chunks: list[Chunk]
    alone: bool = False  # every rank adds for itself: nobody waits for sums
    copied_bytes: int = 0
    added_bytes: int = 0


def copy_of(destination: HostArray, source: HostArray) -> Copy:
    """A copy to be made with `copy_all`, of flat arrays of one dtype."""
    if destination.nbytes > SMALL_BYTES:
        return destination, source
    return destination.view(np.uint8).data, source.view(np.uint8).data


def copy_all(copies: Copies) -> None:
    """Do copies one after another."""
    if len(copies.sources) < MANY:
        for destination, source in copies:
            destination[:] = source
    else:
        deque(map(setitem, copies.destinations, repeat(WHOLE), copies.sources), maxlen=0)


def add_all(sums: Sequence[Sum]) -> None:
    """Do sums one after another."""
    for out, sources, copies, after, way in sums:
        way(out, sources)
        for copy in copies:
            copy[...] = out
        if after is not None:
            after()


class Executor:
    """Does plans, one after another; all ranks the same ones.

    counters: a table of `WORDS`. wait: waits for a counter of another rank's that takes long, with a limit.
    """

    def __init__(self, counters: Counters, wait: Wait) -> None:
        self._counters = counters
        self._wait = wait
        self._step = 0  # chunks done so far

    def begin(self, plan: Plan) -> None:
        """Fill the first chunk: what can be done before all ranks are there."""
        copy_all(plan.chunks[0].fills)

    def finish(self, plan: Plan) -> None:
        """Do the rest, once all ranks are there. Blocks."""
        chunks, first = plan.chunks, self._step
        if plan.alone:
            add_all(chunks[0].sums)
            copy_all(chunks[0].drains)
            return
        counters, n = self._counters, len(chunks)
        for i in range(1, n + 2):
            if i < n:
                copy_all(chunks[i].fills)
                counters.count(FILLED, first + i + 1)
            if i - 1 < n:
                if i > 1 and (request := counters.awaited(FILLED, first + i)) is not None:
                    self._wait(request)
                add_all(chunks[i - 1].sums)
                counters.count(SUMMED, first + i)
            if i > 1:
                if (request := counters.awaited(SUMMED, first + i - 1)) is not None:
                    self._wait(request)
                copy_all(chunks[i - 2].drains)
        self._step = first + n
