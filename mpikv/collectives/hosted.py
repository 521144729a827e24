"""The hierarchical allreduce with its part within a host done in memory that the host's ranks share.

As in `hierarchical`, ring by ring and segment by segment, but no message stays within a host. Each rank makes its
values readable, a segment for every ring in turn; the carrier of a ring adds what its host has and passes it on around
the ring, while later segments are still being copied; what comes back goes straight into the result, which the host has
once, and from there into the arrays of the call. Ranks tell each other through counters (host_key.py) how far they are,
so none waits for another but in a transfer of this key, in whatever order keys are pushed. Values that are still on
their way into the memory (parts.py) are needed in the same order, and counted as they come.

Adds in the same order as `hierarchical`: the same bits, and the same messages between hosts. (Ranks that are
all on one host: one_host.py.)

Cost for h hosts of c ranks: per rank (c-1)n/c elements copied in, unless the values lie in shared memory, (c-1)n/c
added, n copied out; 2(h-1) steps of n/(hc) elements across the link. Restrictions: ranks with a HostKey.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.hierarchical import HostRings
from mpikv.collectives.host_key import FILLED, GATHERED, REDUCED, TOTALS, UPDATED, VALUES, HostKey
from mpikv.collectives.parts import HERE, Coming, Landing, Parts
from mpikv.collectives.ring import Circle
from mpikv.collectives.stages import LINK_SEGMENT_BYTES, LINK_WINDOW, Span, Stage, cut, drive
from mpikv.engine.operation import Steps, Waiter
from mpikv.hostmemory.sums import in_order, newest_first
from mpikv.placement.labels import Comparison
from mpikv.placement.topology import topology
from mpikv.transports.base import Group

Take = Callable[[Span], None]


class _AnyTime:
    """A stage that waits for no other rank."""

    def wakes(self, waiter: Waiter) -> bool:
        return True


class _OnCount:
    """A stage that waits until another rank of the host has counted something."""

    _key: HostKey

    def wakes(self, waiter: Waiter) -> bool:
        return self._key.wakes(waiter)


class _Fill(_AnyTime):
    """A stage that makes this rank's values readable, a segment for each ring in turn."""

    def __init__(self, key: HostKey, values: HostArray, segments: Sequence[tuple[int, Span]]) -> None:
        self._key, self._values, self._segments = key, values, iter(segments)
        self._counts: dict[int, int] = {}
        self.done = False

    def move(self) -> bool:
        ring, (begin, end) = next(self._segments, (-1, (0, 0)))
        if ring < 0:
            self.done = True
            return False
        self._key.own[begin:end] = self._values[begin:end]
        self._counts[ring] = self._counts.get(ring, 0) + 1
        self._key.count(FILLED + ring, self._counts[ring])
        return True


class _Arrive(_AnyTime):
    """A stage that counts for each ring which of its segments are there, of all that come."""

    def __init__(self, key: HostKey, segments: Sequence[tuple[int, Span]], coming: Coming) -> None:
        self._key, self._segments, self._coming = key, segments, coming
        self._told = 0
        self.counts: Counter[int] = Counter()
        self.done = not segments

    def move(self) -> bool:
        told, count = self._told, self._coming.count
        if count <= told:
            return False
        self._told = count
        new = Counter(ring for ring, _ in self._segments[told:count])
        self.counts += new
        for ring in new:
            self._key.count(FILLED + ring, self.counts[ring])
        self.done = count == len(self._segments)
        return True


class _Collect(_OnCount):
    """A stage that adds the segments of a carrier's ring over the ranks of its host, from its own place on.

    arrive: what counts this rank's own values; None: they are there.
    """

    def __init__(
        self,
        key: HostKey,
        rings: HostRings,
        values: HostArray,
        totals: HostArray,
        segments: Sequence[Span],
        *,
        combine: np.ufunc,
        arrive: _Arrive | None,
    ) -> None:
        # What comes first, what is there second, as for messages.
        self._combine = newest_first(combine)
        self._key, self._segments = key, segments
        self._values, self._totals, self._place, self._arrive = values, totals, rings.place, arrive
        self._others = [(rings.place + i) % rings.n_here for i in range(1, rings.n_here)]
        self._word = FILLED + rings.place
        self._ready = 0  # as far as known
        self.count = 0
        self.done = not segments

    def move(self) -> bool:
        if self.count >= self._ready:
            counts = [self._key.counted(place, self._word) for place in self._others]
            if self._arrive is not None:
                counts.append(self._arrive.counts[self._place])
            self._ready = min(counts, default=len(self._segments))
            if self.count >= self._ready:
                return False
        begin, end = self._segments[self.count]
        own = self._values[begin:end]
        total = own if self._values is self._totals else self._totals[begin:end]
        others = [self._key.array_of(place, VALUES)[begin:end] for place in self._others]
        in_order(total, [own, *others], self._combine)
        self.count += 1
        self.done = self.count == len(self._segments)
        return True


class _Tell(_AnyTime):
    """A stage that counts for the other ranks which segments another stage has done. take: called with each of them."""

    def __init__(
        self, key: HostKey, word: int, segments: Sequence[Span], count: Callable[[], int], take: Take | None = None
    ) -> None:
        self._key, self._word, self._segments, self._count, self._take = key, word, segments, count, take
        self._told = 0
        self.done = not segments

    def move(self) -> bool:
        told, count = self._told, self._count()
        if count <= told:
            return False
        self._told = count
        self._key.count(self._word, count)
        if self._take is not None:
            for span in self._segments[told:count]:
                self._take(span)
        self.done = count >= len(self._segments)
        return True


class _Follow(_OnCount):
    """A stage that ends when other ranks have counted all of their segments. take: called with each, as it is counted.

    segments: by place, in the order in which that rank counts them.
    """

    def __init__(
        self, key: HostKey, word: int, segments: Mapping[int, Sequence[Span]], take: Take | None = None
    ) -> None:
        self._key, self._word, self._take = key, word, take
        self._left = {place: (spans, 0) for place, spans in segments.items() if spans}
        self.done = not self._left

    def move(self) -> bool:
        moved = False
        for place, (spans, taken) in tuple(self._left.items()):
            counted = min(self._key.counted(place, self._word), len(spans))
            if counted == taken:
                continue
            moved = True
            if self._take is not None:
                for span in spans[taken:counted]:
                    self._take(span)
            if counted == len(spans):
                del self._left[place]
            else:
                self._left[place] = (spans, counted)
        self.done = not self._left
        return moved


class _Further(_OnCount):
    """A stage that counts which of the further ranks' segments, in the order of the ring, have been updated by them."""

    def __init__(self, key: HostKey, segments: Sequence[tuple[int, Span]]) -> None:
        self._key, self._places = key, [place for place, _ in segments]
        self.count = 0
        self.done = not segments

    def move(self) -> bool:
        moved = False
        # A further rank counts once, when it has updated its whole chunk.
        while self.count < len(self._places) and self._key.counted(self._places[self.count], UPDATED):
            self.count += 1
            moved = True
        self.done = self.count == len(self._places)
        return moved


def share(group: Group, key: HostKey, tag: int) -> Steps[None]:
    """Give every host the key's value that rank 0 has written to its own. Collective; before the first round.

    One rank of each host receives it, and says so to the others. Yields each request it must wait for.
    """
    if key.value.size == 0:
        return
    found = topology(group.hosts)
    if found.local_rank[group.rank]:
        yield from drive(_Follow(key, GATHERED, {0: [(0, key.value.size)]}))
        return
    yield from broadcast(group.part([ranks[0] for ranks in found.hosts]), key.value, 0, tag)
    key.count(GATHERED, 1)


def reduce_scatter(
    group: Group,
    values: HostArray,
    chunks: Sequence[int],
    tag: int,
    key: HostKey,
    *,
    changeable: bool,
    combine: np.ufunc = np.add,
    comparison: Comparison | None = None,
    parts: Parts = HERE,
) -> Steps[HostArray]:
    """Add `values` over all ranks, or `combine` them; returns (n,) with the result in this rank's own chunk.

    values: (n,), contiguous, in the dtype of the sums; not to be changed until the `allgather` of the same round has
    ended, but by us where it is `changeable`. comparison: that of `group`, where labels are compared. parts: how the
    values, in shared memory unless all are there, come, and what becomes of the result. Collective. Yields each request
    it must wait for.
    """
    rings = HostRings(group, values, chunks, tag)
    shared = key.is_shared(values)
    totals = values if changeable and (shared or not rings.hosted()) else key.own
    key.begin(values if shared else key.own, totals, comparison)
    rings.buf = totals
    outgoing = rings.by_ring(reducing=True)
    stages: list[Stage] = []
    landed, arrive = parts.landed, None
    begin, end = chunks[group.rank : group.rank + 2]
    if landed is not None:
        assert shared
        order = rings.by_ring(reducing=True, own=True)
        coming = parts.coming(span for _, span in order)
        arrive = _Arrive(key, order, coming)
        stages += [coming, arrive]
    elif shared:
        for ring in range(rings.n_rings):
            key.count(FILLED + ring, sum(one == ring for one, _ in outgoing))
    else:
        stages.append(_Fill(key, values, outgoing))
    if not rings.carries:
        carrier = rings.place % rings.n_rings
        owned = bool(rings.further[rings.place])
        through = [span for place, span in rings.further_of(carrier) if owned and place <= rings.place]

        def take(span: Span) -> None:
            if landed is not None and begin <= span[0] < end:
                landed(key.array_of(carrier, TOTALS), span)

        stages.append(_Follow(key, REDUCED, {carrier: through}, None if landed is None else take))
        yield from drive(*stages)
        return key.array_of(carrier, TOTALS) if owned else values
    steps = rings.steps(rings.place, reducing=True)
    segments = [span for step in steps for span in step]
    collect = _Collect(key, rings, values, totals, segments, combine=combine, arrive=arrive)
    stages.append(collect)
    hosted = [span for _, span in rings.hosted()]
    if rings.short:
        yield from drive(*stages)
        packed, ends = rings.packed()
        yield from rings.direct().reduce_scatter(rings.across, packed, ends, tag, combine)
        rings.unpack(packed, [rings.host])
        key.count(REDUCED, len(hosted))
        if landed is not None and begin < end:
            landed(totals, (begin, end))
        return totals
    circle = Circle(
        rings.across, totals, steps, tag, LINK_WINDOW, reducing=True, ready=lambda: collect.count, combine=combine
    )
    unhosted = len(segments) - len(hosted)
    before = len(segments) - len(steps[-1])
    owned_here = steps[-1][: len(steps[-1]) - len(hosted)]
    stages += [
        circle.receiver,
        circle.sender,
        _Tell(key, REDUCED, hosted, lambda: circle.count() - unhosted),
        Landing(parts, totals, owned_here, lambda: circle.count() - before),
    ]
    yield from drive(*stages)
    return totals


def allgather(
    group: Group, chunks: Sequence[int], tag: int, key: HostKey, outs: Sequence[HostArray] = (), *, parts: Parts = HERE
) -> Steps[None]:
    """Complete the host's result: chunk i of it is rank i's at the start, on all hosts at the end; copy it to `outs`.

    outs: (n,), contiguous, any dtype. parts: how this rank's chunk comes, and what becomes of the others. Collective.
    Yields each request it must wait for.
    """
    rings = HostRings(group, key.value, chunks, tag)
    landed, begin, end = parts.landed, chunks[group.rank], chunks[group.rank + 1]

    def drain(span: Span) -> None:
        for out in outs:
            out[span[0] : span[1]] = rings.view(span)
        if landed is not None and not begin <= span[0] < end:
            landed(key.value, span)

    segments = {
        ring: [span for step in rings.steps(ring, reducing=False) for span in step] for ring in range(rings.n_rings)
    }
    own = segments.pop(rings.place, [])
    others = _Follow(key, GATHERED, segments, drain)
    coming = parts.coming(cut((begin, end), key.value.itemsize, LINK_SEGMENT_BYTES))
    if not rings.carries:
        yield from drive(coming)
        key.count(UPDATED, 1)
        yield from drive(others)
        return
    further = _Further(key, rings.hosted())
    if rings.short:
        yield from drive(coming, further)
        packed, ends = rings.packed()
        yield from rings.direct().allgather(rings.across, packed, ends, tag)
        rings.unpack(packed, range(rings.n_hosts))
        yield from drive(_Tell(key, GATHERED, own, lambda: len(own), drain), others)
        return
    n_unhosted = len(rings.steps(rings.place, reducing=False)[0]) - len(rings.hosted())

    def ready() -> int:
        if not coming.done:
            return coming.count
        return len(own) if further.done else n_unhosted + further.count

    circle = Circle(
        rings.across, key.value, rings.steps(rings.place, reducing=False), tag, LINK_WINDOW, reducing=False, ready=ready
    )
    yield from drive(
        coming, further, circle.receiver, circle.sender, _Tell(key, GATHERED, own, circle.count, drain), others
    )
