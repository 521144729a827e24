"""Allreduce for several ranks on each of several hosts: every byte crosses a host's link once, whatever their number.

The buffer is divided over c rings of ranks, each with one rank of every host: the ring's *carrier* on that host. The
ranks of a host send each segment that they have to add straight to the carrier of its ring; the carriers of a ring add
it and pass it on; and each carrier sends what is finished to the ranks of its host. So all carriers use the link at the
same time. All three go on side by side, segment by segment in the order of the ring, so that the work within the
host is hidden behind the link. Short buffers, where steps count and not bytes, go through the direct algorithm or
halving and doubling between the carriers, in place of the ring.

c is the size of the smallest host. The further ranks of a larger host carry nothing. Each of them belongs to one of the
rings, in turn, and its chunk passes through the carrier of that ring, which takes one more message within the host.
Chunk of host j: added in the order of the hosts j+1, j+2, ..., j, and within a host in the order of the ranks from the
carrier on; so the order follows from the ranks alone.

Cost for h hosts of c ranks: bytes out of each host 2(h-1)/h n; per rank 2(h-1) steps of n/(hc) elements across the
link and 2(c-1)n/c elements within the host; scratch: c windows of segments. On one host this is `naive`, with one rank
on every host `ring`. Restrictions: none.
Source: Cho, Finkler, Kung and Hunter, BlueConnect, Proc. SysML (2019): reduce-scatter and allgather level by level.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives import halving_doubling, naive
from mpikv.collectives.ring import Circle, passing
from mpikv.collectives.stages import LINK_SEGMENT_BYTES, LINK_WINDOW, Receiver, Sender, Span, Stage, cut, drive, scratch
from mpikv.engine.operation import Steps
from mpikv.placement.topology import topology
from mpikv.transports.base import Group

# One ring's part of up to so many bytes takes as long as a few messages: fewer steps then win over equal shares of the
# link.
SHORT_BYTES = 32 << 10
DIRECT_HOSTS = 4  # up to so many hosts every carrier may send to all others at once


class HostRings:
    """This rank's place among hosts and rings, and what passes through its host."""

    def __init__(self, group: Group, buf: HostArray, chunks: Sequence[int], tag: int) -> None:
        found = topology(group.hosts)
        self.buf, self.tag = buf, tag
        self.n_hosts, self.n_rings = len(found.hosts), found.carriers
        self.host, self.place = found.host_of[group.rank], found.local_rank[group.rank]
        ranks_here = found.hosts[self.host]
        self.n_here = len(ranks_here)
        self.local = group.part(ranks_here)
        # of each ring and host: the chunks of the ranks of the ring, its carrier's first
        self.chunks = [
            [[(chunks[rank], chunks[rank + 1]) for rank in ranks[ring :: self.n_rings]] for ranks in found.hosts]
            for ring in range(self.n_rings)
        ]
        self.carries = self.place < self.n_rings
        if self.carries:
            self.across = group.part([ranks[self.place] for ranks in found.hosts])
        # of each rank of this host beyond the carriers: its place and the segments of its chunk
        self.further = {
            place: list(cut((chunks[rank], chunks[rank + 1]), buf.itemsize, LINK_SEGMENT_BYTES))
            for place, rank in enumerate(ranks_here)
            if place >= self.n_rings
        }
        self.short = buf.nbytes <= SHORT_BYTES * self.n_rings

    def steps(self, ring: int, *, reducing: bool) -> list[list[Span]]:
        """The segments of a ring as they pass its carrier on this host."""
        return passing(self.chunks[ring], self.host, self.buf.itemsize, LINK_SEGMENT_BYTES, reducing=reducing)

    def by_ring(self, *, reducing: bool, own: bool = False) -> list[tuple[int, Span]]:
        """(ring, segment) of all rings, in turn, but this rank's own, which comes last where it is asked for, too."""
        others = [ring for ring in range(self.n_rings) if ring != self.place]
        if own and self.carries:
            others.append(self.place)
        segments = [[s for step in self.steps(ring, reducing=reducing) for s in step] for ring in others]
        rows = itertools.zip_longest(*segments)
        return [(ring, span) for row in rows for ring, span in zip(others, row, strict=True) if span is not None]

    def view(self, span: Span) -> HostArray:
        """That part of the buffer."""
        return self.buf[span[0] : span[1]]

    def sender(self, segments: Sequence[tuple[int, Span]], ready: Callable[[], int]) -> Sender:
        """To ranks of this host, by place."""
        return Sender(self.local, [(at, self.view(span)) for at, span in segments], self.tag, LINK_WINDOW, ready)

    def receiver(self, segments: Sequence[tuple[int, Span]]) -> Receiver:
        """From ranks of this host, by place, into the buffer."""
        return Receiver(self.local, [(at, self.view(span)) for at, span in segments], self.tag, LINK_WINDOW)

    def results(self) -> Receiver:
        """The sums of this further rank's own chunk, from its carrier."""
        views = [self.view(span) for span in self.further[self.place]]
        targets = scratch(self.local, views, LINK_WINDOW)

        def take(i: int) -> None:
            views[i][...] = targets[i][: views[i].size]

        carrier = self.place % self.n_rings
        return Receiver(self.local, [(carrier, target) for target in targets], self.tag, LINK_WINDOW, take=take)

    def collector(self, segments: Sequence[Span], combine: np.ufunc) -> Receiver:
        """From all other ranks of this host, each segment in turn, combined with the buffer."""
        sources = [(self.place + i) % self.n_here for i in range(1, self.n_here)]
        views = [self.view(span) for span in segments for _ in sources]
        targets = scratch(self.local, views, LINK_WINDOW)

        def add(i: int) -> None:
            combine(targets[i][: views[i].size], views[i], out=views[i])

        return Receiver(
            self.local, list(zip(sources * len(segments), targets, strict=True)), self.tag, LINK_WINDOW, take=add
        )

    def hosted(self) -> list[tuple[int, Span]]:
        """(place, segment) of the ranks of this host whose chunks pass through this carrier."""
        return self.further_of(self.place)

    def further_of(self, carrier: int) -> list[tuple[int, Span]]:
        """The same of another carrier of this host."""
        return [
            (place, span) for place, spans in self.further.items() for span in spans if place % self.n_rings == carrier
        ]

    def packed(self) -> tuple[HostArray, tuple[int, ...]]:
        """A copy of this ring's part of the buffer, host after host, and the bounds of the hosts' parts in it."""
        parts = [self.view(span) for spans in self.chunks[self.place] for span in spans]
        lengths = [sum(end - begin for begin, end in spans) for spans in self.chunks[self.place]]
        ends = (0, *itertools.accumulate(lengths))
        packed = self.local.empty(ends[-1], self.buf.dtype)
        at = 0
        for part in parts:
            packed[at : at + part.size] = part
            at += part.size
        return packed, ends

    def unpack(self, packed: HostArray, hosts: Iterable[int]) -> None:
        """Write the parts of these hosts back."""
        ends = list(itertools.accumulate(end - begin for spans in self.chunks[self.place] for begin, end in spans))
        at = iter(ends)
        for host, spans in enumerate(self.chunks[self.place]):
            for span in spans:
                end = next(at)
                if host in hosts:
                    self.view(span)[...] = packed[end - (span[1] - span[0]) : end]

    def direct(self) -> ModuleType:
        """The algorithm across hosts for short buffers. Halving and doubling where no host is folded."""
        power_of_two = self.n_hosts & (self.n_hosts - 1) == 0
        return halving_doubling if self.n_hosts > DIRECT_HOSTS and power_of_two else naive


def _all() -> int:
    return sys.maxsize


def reduce_scatter(
    group: Group, buf: HostArray, chunks: Sequence[int], tag: int, combine: np.ufunc = np.add
) -> Steps[None]:
    """Add `buf` over all ranks, or `combine` it; then each rank's own chunk of its `buf` holds the result.

    buf: (n,), contiguous, same n and dtype on every rank; its other chunks hold partial sums afterwards. Collective.
    Yields each request it must wait for.
    """
    if len(set(group.hosts)) == 1:
        yield from naive.reduce_scatter(group, buf, chunks, tag, combine)
        return
    rings = HostRings(group, buf, chunks, tag)
    stages: list[Stage] = [rings.sender(rings.by_ring(reducing=True), _all)]
    if not rings.carries:
        stages.append(rings.results())
        yield from drive(*stages)
        return
    steps = rings.steps(rings.place, reducing=True)
    segments = [span for step in steps for span in step]
    collector = rings.collector(segments, combine)
    stages.append(collector)
    hosted = rings.hosted()
    if rings.short:
        yield from drive(*stages)
        packed, ends = rings.packed()
        yield from rings.direct().reduce_scatter(rings.across, packed, ends, tag, combine)
        rings.unpack(packed, [rings.host])
        yield from drive(rings.sender(hosted, _all))
        return
    n_others = rings.n_here - 1
    ready = (lambda: collector.count // n_others) if n_others else None
    circle = Circle(rings.across, buf, steps, tag, LINK_WINDOW, reducing=True, ready=ready, combine=combine)
    # The chunks of this host come last, and the further ranks' after the carrier's own.
    unhosted = len(segments) - len(hosted)
    stages += [circle.receiver, circle.sender, rings.sender(hosted, lambda: circle.count() - unhosted)]
    yield from drive(*stages)


def allgather(group: Group, buf: HostArray, chunks: Sequence[int], tag: int) -> Steps[None]:
    """Give every rank every chunk: chunk i of `buf` is rank i's at the start, on all ranks at the end.

    buf: (n,), contiguous, same n and dtype on every rank. Collective. Yields each request it must wait for.
    """
    if len(set(group.hosts)) == 1:
        yield from naive.allgather(group, buf, chunks, tag)
        return
    rings = HostRings(group, buf, chunks, tag)
    mine = rings.further.get(rings.place, [])
    incoming = [(at, span) for at, span in rings.by_ring(reducing=False) if span not in mine]
    stages: list[Stage] = [rings.receiver(incoming)]
    if not rings.carries:
        stages.append(rings.sender([(rings.place % rings.n_rings, span) for span in mine], _all))
        yield from drive(*stages)
        return
    steps = rings.steps(rings.place, reducing=False)
    segments = [span for step in steps for span in step]
    hosted = rings.hosted()
    further = rings.receiver(hosted)
    # Every finished segment goes to the other ranks of this host, but not back to where it came from.
    came_from = {span: place for place, span in hosted}
    receivers = [
        [(place, span) for place in range(rings.n_here) if place not in (rings.place, came_from.get(span))]
        for span in segments
    ]
    through = [0, *itertools.accumulate(len(places) for places in receivers)]
    outgoing = [entry for entries in receivers for entry in entries]
    if rings.short:
        yield from drive(further)
        packed, ends = rings.packed()
        yield from rings.direct().allgather(rings.across, packed, ends, tag)
        rings.unpack(packed, range(rings.n_hosts))
        yield from drive(*stages, rings.sender(outgoing, _all))
        return
    n_own = len(steps[0]) - len(hosted)

    def ready() -> int:
        return len(segments) if further.done else n_own + further.count

    circle = Circle(rings.across, buf, steps, tag, LINK_WINDOW, reducing=False, ready=ready)
    stages += [further, circle.receiver, circle.sender, rings.sender(outgoing, lambda: through[circle.count()])]
    yield from drive(*stages)
