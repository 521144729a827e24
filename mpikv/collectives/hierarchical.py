"""Allreduce for several ranks on each of several hosts: every byte crosses a host's link once, whatever their number.

There are c rings, and the buffer is divided over them. Each ring has one rank of every host, its *leader* there. In the
reduce-scatter the ranks of a host send each segment to the leader of its ring, and the leaders of a ring add it and
pass it on; in the allgather each leader sends finished segments to the ranks of its host. So all leaders of a host use
its link at the same time. The steps run concurrently, segment by segment in the order of the ring, so that the work
within a host takes place while the link is in use. For short buffers the number of steps counts more than bytes, so the
direct algorithm or halving and doubling runs between the leaders in place of the ring.

c is the size of the smallest host. Ranks of a larger host beyond the first c are *extra* ranks, which lead no ring.
They are assigned to the rings in turn, and the chunk of each passes through the leader of its ring, which takes one
more message within the host. A chunk of host j is added in the order of the hosts j+1, j+2, ..., j, and within a host
in the order of the ranks from the leader on; so the order depends on the ranks alone.

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
from mpikv.collectives.ring import RingStages, segments_by_step
from mpikv.collectives.stages import LINK_WINDOW, Receiver, Sender, Span, Stage, cut, drive, scratch
from mpikv.engine.operation import Steps
from mpikv.placement.algorithms import LINK_SEGMENT_BYTES
from mpikv.placement.topology import topology
from mpikv.transports.base import Group

# Up to so many bytes for each ring are sent in the time of a few messages: then fewer steps gain more than equal use of
# the links.
SHORT_BYTES = 32 << 10
DIRECT_HOSTS = 4  # up to so many hosts every leader may send to all others at once


class HostRings:
    """The rings as one rank needs them: which one it leads, and the segments that it sends and receives."""

    def __init__(self, group: Group, buf: HostArray, chunks: Sequence[int], tag: int) -> None:
        found = topology(group.hosts)
        self.buf, self.tag = buf, tag
        self.n_hosts, self.n_rings = len(found.hosts), found.n_leaders
        self.host, self.local_rank = found.host_of[group.rank], found.local_rank[group.rank]
        ranks_here = found.hosts[self.host]
        self.n_here = len(ranks_here)
        self.local = group.part(ranks_here)
        # For each ring and host: the chunks of the leader, then of the extra ranks that are assigned to the ring.
        self.chunks = [
            [[(chunks[rank], chunks[rank + 1]) for rank in ranks[ring :: self.n_rings]] for ranks in found.hosts]
            for ring in range(self.n_rings)
        ]
        self.is_leader = self.local_rank < self.n_rings
        if self.is_leader:
            self.across = group.part([ranks[self.local_rank] for ranks in found.hosts])
        # For each extra rank of this host, by local rank: the segments of its chunk.
        self.extra_chunks = {
            local_rank: list(cut((chunks[rank], chunks[rank + 1]), buf.itemsize, LINK_SEGMENT_BYTES))
            for local_rank, rank in enumerate(ranks_here)
            if local_rank >= self.n_rings
        }
        self.short = buf.nbytes <= SHORT_BYTES * self.n_rings

    def steps(self, ring: int, *, reducing: bool) -> list[list[Span]]:
        return segments_by_step(self.chunks[ring], self.host, self.buf.itemsize, LINK_SEGMENT_BYTES, reducing=reducing)

    def by_ring(self, *, reducing: bool) -> list[tuple[int, Span]]:
        others = [ring for ring in range(self.n_rings) if ring != self.local_rank]
        segments = [[s for step in self.steps(ring, reducing=reducing) for s in step] for ring in others]
        rows = itertools.zip_longest(*segments)
        return [(ring, span) for row in rows for ring, span in zip(others, row, strict=True) if span is not None]

    def view(self, span: Span) -> HostArray:
        return self.buf[span[0] : span[1]]

    def sender(self, segments: Sequence[tuple[int, Span]], ready: Callable[[], int]) -> Sender:
        return Sender(self.local, [(at, self.view(span)) for at, span in segments], self.tag, LINK_WINDOW, ready)

    def receiver(self, segments: Sequence[tuple[int, Span]]) -> Receiver:
        """Return a stage that receives segments from ranks of this host into the buffer."""
        return Receiver(self.local, [(at, self.view(span)) for at, span in segments], self.tag, LINK_WINDOW)

    def results(self) -> Receiver:
        """Return a stage that receives the sum of this extra rank's chunk from its leader."""
        views = [self.view(span) for span in self.extra_chunks[self.local_rank]]
        targets = scratch(self.local, views, LINK_WINDOW)

        def take(i: int) -> None:
            views[i][...] = targets[i][: views[i].size]

        leader = self.local_rank % self.n_rings
        return Receiver(self.local, [(leader, target) for target in targets], self.tag, LINK_WINDOW, take=take)

    def collector(self, segments: Sequence[Span], combine: np.ufunc) -> Receiver:
        """Return a stage that receives each segment from all other ranks of this host and adds it to the buffer."""
        sources = [(self.local_rank + i) % self.n_here for i in range(1, self.n_here)]
        views = [self.view(span) for span in segments for _ in sources]
        targets = scratch(self.local, views, LINK_WINDOW)

        def add(i: int) -> None:
            combine(targets[i][: views[i].size], views[i], out=views[i])

        return Receiver(
            self.local, list(zip(sources * len(segments), targets, strict=True)), self.tag, LINK_WINDOW, take=add
        )

    def extra_segments(self, leader: int | None = None) -> list[tuple[int, Span]]:
        """Return (local rank, segment) of the extra ranks' chunks that pass through a leader, by default this one."""
        leader = self.local_rank if leader is None else leader
        return [
            (local_rank, span)
            for local_rank, spans in self.extra_chunks.items()
            for span in spans
            if local_rank % self.n_rings == leader
        ]

    def packed(self) -> tuple[HostArray, tuple[int, ...]]:
        """Return a copy of this ring's elements of the buffer, host after host, and where those of each host begin."""
        chunks = self.chunks[self.local_rank]
        ends = (0, *itertools.accumulate(sum(end - begin for begin, end in spans) for spans in chunks))
        packed = self.local.empty(ends[-1], self.buf.dtype)
        np.concatenate([self.view(span) for spans in chunks for span in spans], out=packed)
        return packed, ends

    def unpack(self, packed: HostArray, hosts: Iterable[int]) -> None:
        """Write the elements of these hosts back to the buffer."""
        at = 0
        for host, spans in enumerate(self.chunks[self.local_rank]):
            for begin, end in spans:
                if host in hosts:
                    self.buf[begin:end] = packed[at : at + end - begin]
                at += end - begin

    def direct(self) -> ModuleType:
        """Return the algorithm between leaders for short buffers: halving and doubling where it folds no host."""
        power_of_two = self.n_hosts & (self.n_hosts - 1) == 0
        return halving_doubling if self.n_hosts > DIRECT_HOSTS and power_of_two else naive


def _all() -> int:
    return sys.maxsize


def reduce_scatter(
    group: Group, buf: HostArray, chunks: Sequence[int], tag: int, combine: np.ufunc = np.add
) -> Steps[None]:
    if len(set(group.hosts)) == 1:
        yield from naive.reduce_scatter(group, buf, chunks, tag, combine)
        return
    rings = HostRings(group, buf, chunks, tag)
    stages: list[Stage] = [rings.sender(rings.by_ring(reducing=True), _all)]
    if not rings.is_leader:
        stages.append(rings.results())
        yield from drive(*stages)
        return
    steps = rings.steps(rings.local_rank, reducing=True)
    segments = [span for step in steps for span in step]
    collector = rings.collector(segments, combine)
    stages.append(collector)
    extra = rings.extra_segments()
    if rings.short:
        yield from drive(*stages)
        packed, ends = rings.packed()
        yield from rings.direct().reduce_scatter(rings.across, packed, ends, tag, combine)
        rings.unpack(packed, [rings.host])
        yield from drive(rings.sender(extra, _all))
        return
    n_others = rings.n_here - 1
    ready = (lambda: collector.count // n_others) if n_others else None
    ring_stages = RingStages(rings.across, buf, steps, tag, LINK_WINDOW, reducing=True, ready=ready, combine=combine)
    # This host's chunks come last in the ring, and of these the extra ranks' after the leader's own.
    n_leaders_own = len(segments) - len(extra)
    stages += [
        ring_stages.receiver,
        ring_stages.sender,
        rings.sender(extra, lambda: ring_stages.count() - n_leaders_own),
    ]
    yield from drive(*stages)


def allgather(group: Group, buf: HostArray, chunks: Sequence[int], tag: int) -> Steps[None]:
    if len(set(group.hosts)) == 1:
        yield from naive.allgather(group, buf, chunks, tag)
        return
    rings = HostRings(group, buf, chunks, tag)
    mine = rings.extra_chunks.get(rings.local_rank, [])
    incoming = [(at, span) for at, span in rings.by_ring(reducing=False) if span not in mine]
    stages: list[Stage] = [rings.receiver(incoming)]
    if not rings.is_leader:
        stages.append(rings.sender([(rings.local_rank % rings.n_rings, span) for span in mine], _all))
        yield from drive(*stages)
        return
    steps = rings.steps(rings.local_rank, reducing=False)
    segments = [span for step in steps for span in step]
    extra = rings.extra_segments()
    from_extra = rings.receiver(extra)
    # Every finished segment goes to the other ranks of this host, but not back to the rank it came from.
    came_from = {span: local_rank for local_rank, span in extra}
    receivers = [
        [
            (local_rank, span)
            for local_rank in range(rings.n_here)
            if local_rank not in (rings.local_rank, came_from.get(span))
        ]
        for span in segments
    ]
    through = [0, *itertools.accumulate(len(local_ranks) for local_ranks in receivers)]
    outgoing = [entry for entries in receivers for entry in entries]
    if rings.short:
        yield from drive(from_extra)
        packed, ends = rings.packed()
        yield from rings.direct().allgather(rings.across, packed, ends, tag)
        rings.unpack(packed, range(rings.n_hosts))
        yield from drive(*stages, rings.sender(outgoing, _all))
        return
    n_own = len(steps[0]) - len(extra)

    def ready() -> int:
        return len(segments) if from_extra.done else n_own + from_extra.count

    ring_stages = RingStages(rings.across, buf, steps, tag, LINK_WINDOW, reducing=False, ready=ready)
    stages += [
        from_extra,
        ring_stages.receiver,
        ring_stages.sender,
        rings.sender(outgoing, lambda: through[ring_stages.count()]),
    ]
    yield from drive(*stages)
