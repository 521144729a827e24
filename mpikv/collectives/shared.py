"""Sums through memory that the ranks of a host share.

All ranks are in the same call (hostmemory/common_calls). A rank follows a *plan* for the call: a list of chunks, each
small enough for the cache. (These chunks are not those of the ring: every rank works on each of them.) A chunk goes
through three steps, and three chunks are in different steps at the same time, so that ranks seldom wait:

- fill: each rank copies its values into its slot of shared memory, unless the others can read them where they are;
- sum: each rank adds its own range of elements over all ranks, in the order of the ranks: the same bits as servers;
- drain: each rank copies the result out to its arrays.

Arrays that lie in shared memory need neither fill nor drain: each rank adds its range in place, into the array of the
first rank, and copies the sum to the others.

Cost per rank, n elements, p ranks: n(p-1)/p copied in, n(p-1)/p added, n copied out; in place n(p-1)/p added and
n(p-1)/p copied. Two waits per chunk; one for values of up to 16 KiB, which every rank adds as a whole by itself. No
message. Scratch: three chunks per rank. Restrictions: one host. Plans are made in shared_plans.py.
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

MANY = 8  # from so many copies on a loop in C is faster

Copy = tuple[Any, Any]  # destination and source: two arrays or two memoryviews
WHOLE = slice(None)
Wait = Callable[[Reached], None]

WORDS = FREE + 2  # of each rank: those of common_calls.py, then two that count filled and summed chunks


class Sum(NamedTuple):
    """Let `adder` combine `sources` into `out`, then copy `out` to `copies`, then call `after`."""

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
    return Sum(out, tuple(sources), tuple(copies), after, adder_of(sources[0].dtype, op))


class Copies:
    __slots__ = ("destinations", "sources")

    def __init__(self) -> None:
        self.destinations: list[Any] = []
        self.sources: list[Any] = []

    def add(self, copies: Iterable[Copy]) -> None:
        for destination, source in copies:
            self.destinations.append(destination)
            self.sources.append(source)

    def append(self, destination: HostArray, source: HostArray) -> None:
        """Add a copy of arrays that is made only once: for one use `copy_of` would cost more than it saves."""
        self.destinations.append(destination)
        self.sources.append(source)

    @property
    def n_bytes(self) -> int:
        return sum(destination.nbytes for destination in self.destinations)


@dataclass(slots=True)
class Chunk:
    fills: Copies = field(default_factory=Copies)
    sums: list[Sum] = field(default_factory=list)
    drains: Copies = field(default_factory=Copies)


@dataclass
class Plan:
    chunks: list[Chunk]
    alone: bool = False  # every rank adds all elements by itself, so no rank waits for another's sums
    copied_bytes: int = 0
    added_bytes: int = 0


def copy_of(destination: HostArray, source: HostArray) -> Copy:
    """Return a copy for `Copies.add`, between flat arrays of one dtype."""
    if destination.nbytes > SMALL_BYTES:
        return destination, source
    return destination.view(np.uint8).data, source.view(np.uint8).data


def copy_all(copies: Copies) -> None:
    sources, destinations = copies.sources, copies.destinations
    if len(sources) < MANY:
        for destination, source in zip(destinations, sources, strict=True):
            destination[:] = source
    else:
        deque(map(setitem, destinations, repeat(WHOLE), sources), maxlen=0)


def add_all(sums: Sequence[Sum]) -> None:
    for out, sources, copies, after, adder in sums:
        adder(out, sources)
        for copy in copies:
            copy[...] = out
        if after is not None:
            after()


class ChunkWords(NamedTuple):
    """The words of a table in which ranks count the chunks that they have filled, summed and drained.

    drained: None where each rank waits for the sums of every chunk: so it never fills a slot that another rank still
    reads. Else a rank waits only for the chunks that it needs, and may be ahead of others, even in the next call; so
    before it fills one of `slots` slots again, it waits until all ranks have drained that slot.
    """

    filled: int
    summed: int
    drained: int | None = None
    slots: int = 0


CHUNK_WORDS = ChunkWords(FREE, FREE + 1)


def run_chunks(counters: Counters, words: ChunkWords, chunks: Sequence[Chunk], first: int) -> Iterator[Reached]:
    """Run a call whose first chunk all ranks have filled. first: how many chunks all earlier calls had."""
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
    """Runs plans one after another, the same on all ranks. counters: of `WORDS`."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._n_chunks = 0  # of all plans so far

    def begin(self, plan: Plan) -> None:
        """Fill the first chunk, which can be done before all ranks have made the call."""
        copy_all(plan.chunks[0].fills)

    def finish(self, plan: Plan, wait: Wait) -> None:
        """Run the rest of the plan, once all ranks have made the call. Blocks. wait: until ranks have counted."""
        chunks = plan.chunks
        if plan.alone:
            add_all(chunks[0].sums)
            copy_all(chunks[0].drains)
            return
        for request in run_chunks(self._counters, CHUNK_WORDS, chunks, self._n_chunks):
            wait(request)
        self._n_chunks += len(chunks)
