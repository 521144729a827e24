"""Sums through memory that the ranks of a host share.

All ranks are in the same call (hostmemory/common_calls). A call is a *plan*: a list of chunks, each small enough for
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
from mpikv.hostmemory.common_calls import FREE
from mpikv.hostmemory.counters import Counters, Reached
from mpikv.hostmemory.sums import Adder, adder_of

SMALL_BYTES = 4 << 10  # copies up to this are made through memoryviews, which start in a third of the time

MANY = 8  # copies from which on a loop in C pays

Copy = tuple[Any, Any]  # destination and source: two arrays or two memoryviews
WHOLE = slice(None)
Wait = Callable[[Reached], None]

WORDS = FREE + 2  # of the decision on calls, and of their steps


class Sum(NamedTuple):
    """`out` becomes what `adder` makes of `sources`; then it is copied to `copies`, then `after` is called."""

    out: HostArray
    sources: tuple[HostArray, ...]
    copies: tuple[HostArray, ...]
    after: Callable[[], None] | None
    adder: Adder


def summed(
    out: HostArray,
    sources: Sequence[HostArray],
    copies: Sequence[HostArray] = (),
    after: Callable[[], None] | None = None,
    op: Reduction = SUM,
) -> Sum:
    """A `Sum`, or what another reduction makes of one array of each rank."""
    adder = adder_of(sources[0].dtype, op.combine, op.finish if op.is_mean else None)
    return Sum(out, tuple(sources), tuple(copies), after, adder)


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

    def append(self, destination: HostArray, source: HostArray) -> None:
        """One more, that is made once: what `copy_of` does would cost more than it saves."""
        self.destinations.append(destination)
        self.sources.append(source)

    @property
    def n_bytes(self) -> int:
        """What they copy."""
        return sum(destination.nbytes for destination in self.destinations)


@dataclass(slots=True)
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
    sources, destinations = copies.sources, copies.destinations
    if len(sources) < MANY:
        for destination, source in zip(destinations, sources, strict=True):
            destination[:] = source
    else:
        deque(map(setitem, destinations, repeat(WHOLE), sources), maxlen=0)


def add_all(sums: Sequence[Sum]) -> None:
    """Do sums one after another."""
    for out, sources, copies, after, adder in sums:
        adder(out, sources)
        for copy in copies:
            copy[...] = out
        if after is not None:
            after()


class ChunkWords(NamedTuple):
    """The words of a table in which ranks count the chunks that they have filled, summed and drained.

    drained: None where each rank waits for the sums of every chunk, so that it cannot come back to a slot that another
    rank still reads. Else a rank waits only for what it needs, may be ahead of others also into the next call, and
    looks here before it fills one of `slots` slots again.
    """

    filled: int
    summed: int
    drained: int | None = None
    slots: int = 0


CHUNK_WORDS = ChunkWords(FREE, FREE + 1)


def in_chunks(counters: Counters, words: ChunkWords, chunks: Sequence[Chunk], first: int) -> Iterator[Reached]:
    """Do the rest of a call of which all ranks have filled the first chunk. Yields each request it must wait for.

    first: how many chunks all calls before had.
    """
    filled, summed, drained, slots = words
    awaited, count, n = counters.awaited, counters.count, len(chunks)
    waits = drained is None
    for done in range(first + 1, first + n + 2):
        i = done - first
        if i < n:
            if drained is not None and (request := awaited(drained, done - slots + 1)) is not None:
                yield request
            copy_all(chunks[i].fills)
            count(filled, done + 1)
        if i <= n:
            sums = chunks[i - 1].sums
            if i > 1 and (sums or waits) and (request := awaited(filled, done)) is not None:
                yield request
            add_all(sums)
            count(summed, done)
        if i > 1:
            drains = chunks[i - 2].drains
            if (waits or drains.sources) and (request := awaited(summed, done - 1)) is not None:
                yield request
            copy_all(drains)
            if drained is not None:
                count(drained, done - 1)


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
        chunks = plan.chunks
        if plan.alone:
            add_all(chunks[0].sums)
            copy_all(chunks[0].drains)
            return
        for request in in_chunks(self._counters, CHUNK_WORDS, chunks, self._step):
            self._wait(request)
        self._step += len(chunks)
