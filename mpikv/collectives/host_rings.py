"""The rings between hosts that have several ranks each: every byte crosses a host's link once, whatever their number.

There are c rings, and the buffer is divided over them. Each ring has one rank of every host, its *leader* there. In the
reduce-scatter the leader of a ring adds each segment over the ranks of its host, and the leaders of a ring add these
sums and pass them on; in the allgather each leader brings finished segments to the ranks of its host. So all leaders of
a host use its link at the same time.

c is the size of the smallest host. Ranks of a larger host beyond the first c are *extra* ranks, which lead no ring.
They are assigned to the rings in turn, and the chunk of each passes through the leader of its ring. A chunk of host j
is added in the order of the hosts j+1, j+2, ..., j, and within a host in the order of the ranks from the leader on; so
the order depends on the ranks alone.

Source: Cho, Finkler, Kung and Hunter, BlueConnect, Proc. SysML (2019): reduce-scatter and allgather level by level.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.ring import segments_by_step
from mpikv.collectives.stages import Span, cut
from mpikv.placement.links import LINK_SEGMENT_BYTES
from mpikv.placement.topology import topology
from mpikv.transports.base import Group


class HostRings:
    """The rings as one rank needs them: which one it leads, and the segments that it sends and receives."""

    def __init__(self, group: Group, buf: HostArray, chunks: Sequence[int]) -> None:
        found = topology(group.hosts)
        self.buf, self.n_rings = buf, found.n_leaders
        self.host, self.local_rank = found.host_of[group.rank], found.local_rank[group.rank]
        ranks_here = found.hosts[self.host]
        self.n_here = len(ranks_here)
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

    def steps(self, ring: int, *, reducing: bool) -> list[list[Span]]:
        return segments_by_step(self.chunks[ring], self.host, self.buf.itemsize, LINK_SEGMENT_BYTES, reducing=reducing)

    def by_ring(self) -> list[tuple[int, Span]]:
        """Return the segments that leaders of other rings on this host reduce, each with its ring, for each in turn."""
        others = [ring for ring in range(self.n_rings) if ring != self.local_rank]
        segments = [[s for step in self.steps(ring, reducing=True) for s in step] for ring in others]
        rows = itertools.zip_longest(*segments)
        return [(ring, span) for row in rows for ring, span in zip(others, row, strict=True) if span is not None]

    def extra_segments(self, leader: int | None = None) -> list[tuple[int, Span]]:
        """Return (local rank, segment) of the extra ranks' chunks that pass through a leader, by default this one."""
        leader = self.local_rank if leader is None else leader
        return [
            (local_rank, span)
            for local_rank, spans in self.extra_chunks.items()
            for span in spans
            if local_rank % self.n_rings == leader
        ]
