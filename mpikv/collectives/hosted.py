"""The hierarchical allreduce, with memory that a host's ranks share in place of the messages within the host.

It works ring by ring and segment by segment, as `hierarchical` does. Each rank copies its values into the shared
memory, a segment for every ring in turn. The leader of a ring adds the values of its host's ranks and passes the sums
on around the ring, while later segments are still being copied. Finished segments are received into the result, which
the host holds once, and each rank copies them from there to the arrays of the call. Ranks count what they have done in
counters that the others read (host_key.py), so a rank waits for another only in a round of this key, in whatever order
keys are pushed.

Adds in the same order as `hierarchical`: the same bits, and the same messages between hosts. (Ranks that are
all on one host: one_host.py.)

Cost for h hosts of c ranks: per rank (c-1)n/c elements copied in, unless the values lie in shared memory, (c-1)n/c
added, n copied out; 2(h-1) steps of n/(hc) elements across the link. Restrictions: ranks with a HostKey.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.hierarchical import HostRings
from mpikv.collectives.host_key import FILLED, GATHERED, REDUCED, TOTALS, UPDATED, VALUES, HostKey
from mpikv.collectives.ring import RingStages
from mpikv.collectives.stages import LINK_WINDOW, Span, Stage, drive
from mpikv.engine.operation import Steps, Waiter
from mpikv.hostmemory.sums import in_order, newest_first
from mpikv.placement.labels import Comparison
from mpikv.placement.topology import topology
from mpikv.transports.base import Group

Take = Callable[[Span], None]


class _NeverWaits:
    """Base of stages that wait for no other rank."""

    def wakes(self, waiter: Waiter) -> bool:
        return True


class _WaitsForCounters:
    """Base of stages that wait until another rank of the host has counted something."""

    _key: HostKey

    def wakes(self, waiter: Waiter) -> bool:
        return self._key.wakes(waiter)


class _CopyIn(_NeverWaits):
    """A stage that copies this rank's values into shared memory, a segment for each ring in turn, and counts them."""

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


class _AddRanks(_WaitsForCounters):
    """A stage that adds the segments of a leader's ring over its host's ranks, in their order from the leader on."""

    def __init__(
        self,
        key: HostKey,
        rings: HostRings,
        values: HostArray,
        totals: HostArray,
        segments: Sequence[Span],
        *,
        combine: np.ufunc,
    ) -> None:
        # The next rank's values first, the sum so far second, as with messages.
        self._combine = newest_first(combine)
        self._key, self._segments = key, segments
        self._values, self._totals = values, totals
        self._others = [(rings.local_rank + i) % rings.n_here for i in range(1, rings.n_here)]
        self._word = FILLED + rings.local_rank
        self._ready = 0  # segments that all ranks had counted when this rank last looked
        self.count = 0
        self.done = not segments

    def move(self) -> bool:
        if self.count >= self._ready:
            counts = [self._key.counted(local_rank, self._word) for local_rank in self._others]
            self._ready = min(counts, default=len(self._segments))
            if self.count >= self._ready:
                return False
        begin, end = self._segments[self.count]
        own = self._values[begin:end]
        total = own if self._values is self._totals else self._totals[begin:end]
        others = [self._key.array_of(local_rank, VALUES)[begin:end] for local_rank in self._others]
        in_order(total, [own, *others], self._combine)
        self.count += 1
        self.done = self.count == len(self._segments)
        return True


class _PublishCount(_NeverWaits):
    """A stage that counts, for the other ranks to read, the segments that another stage has done.

    count: returns how many these are. take: called with each of them.
    """

    def __init__(
        self, key: HostKey, word: int, segments: Sequence[Span], count: Callable[[], int], take: Take | None = None
    ) -> None:
        self._key, self._word, self._segments, self._count, self._take = key, word, segments, count, take
        self._counted = 0
        self.done = not segments

    def move(self) -> bool:
        counted, count = self._counted, self._count()
        if count <= counted:
            return False
        self._counted = count
        self._key.count(self._word, count)
        if self._take is not None:
            for span in self._segments[counted:count]:
                self._take(span)
        self.done = count >= len(self._segments)
        return True


class _AwaitCounts(_WaitsForCounters):
    """A stage that ends when other ranks have counted all of their segments. take: called with each that is counted.

    segments: by local rank, in the order in which that rank counts them.
    """

    def __init__(
        self, key: HostKey, word: int, segments: Mapping[int, Sequence[Span]], take: Take | None = None
    ) -> None:
        self._key, self._word, self._take = key, word, take
        self._left = {local_rank: (spans, 0) for local_rank, spans in segments.items() if spans}
        self.done = not self._left

    def move(self) -> bool:
        moved = False
        for local_rank, (spans, taken) in tuple(self._left.items()):
            counted = min(self._key.counted(local_rank, self._word), len(spans))
            if counted == taken:
                continue
            moved = True
            if self._take is not None:
                for span in spans[taken:counted]:
                    self._take(span)
            if counted == len(spans):
                del self._left[local_rank]
            else:
                self._left[local_rank] = (spans, counted)
        self.done = not self._left
        return moved


class _AwaitExtraUpdates(_WaitsForCounters):
    """A stage that ends when the extra ranks have updated their chunks. count: their updated segments, in order."""

    def __init__(self, key: HostKey, segments: Sequence[tuple[int, Span]]) -> None:
        self._key, self._local_ranks = key, [local_rank for local_rank, _ in segments]
        self.count = 0
        self.done = not segments

    def move(self) -> bool:
        moved = False
        # An extra rank counts once, when it has updated its whole chunk.
        while self.count < len(self._local_ranks) and self._key.counted(self._local_ranks[self.count], UPDATED):
            self.count += 1
            moved = True
        self.done = self.count == len(self._local_ranks)
        return moved


def share(group: Group, key: HostKey, tag: int) -> Steps[None]:
    """Copy the key's value from rank 0's host to every host. Collective; before the first round.

    One rank of each host receives it, and counts that for the others. Yields each request it must wait for.
    """
    if key.value.size == 0:
        return
    found = topology(group.hosts)
    if found.local_rank[group.rank]:
        yield from drive(_AwaitCounts(key, GATHERED, {0: [(0, key.value.size)]}))
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
) -> Steps[HostArray]:
    """Add `values` over all ranks, or `combine` them; returns (n,) with the result in this rank's own chunk.

    values: (n,), contiguous, in the dtype of the sums; the caller must not change it until the `allgather` of the same
    round has ended. changeable: sums may be written to it. comparison: that of `group`, where labels are compared.
    Collective. Yields each request it must wait for.
    """
    rings = HostRings(group, values, chunks, tag)
    shared = key.is_shared(values)
    totals = values if changeable and (shared or not rings.extra_segments()) else key.own
    key.begin(values if shared else key.own, totals, comparison)
    rings.buf = totals
    outgoing = rings.by_ring(reducing=True)
    stages: list[Stage] = []
    if shared:
        for ring in range(rings.n_rings):
            key.count(FILLED + ring, sum(one == ring for one, _ in outgoing))
    else:
        stages.append(_CopyIn(key, values, outgoing))
    if not rings.is_leader:
        leader = rings.local_rank % rings.n_rings
        owned = bool(rings.extra_chunks[rings.local_rank])
        through = [
            span for local_rank, span in rings.extra_segments_of(leader) if owned and local_rank <= rings.local_rank
        ]
        stages.append(_AwaitCounts(key, REDUCED, {leader: through}))
        yield from drive(*stages)
        return key.array_of(leader, TOTALS) if owned else values
    steps = rings.steps(rings.local_rank, reducing=True)
    segments = [span for step in steps for span in step]
    add_ranks = _AddRanks(key, rings, values, totals, segments, combine=combine)
    stages.append(add_ranks)
    extra = [span for _, span in rings.extra_segments()]
    if rings.short:
        yield from drive(*stages)
        packed, ends = rings.packed()
        yield from rings.direct().reduce_scatter(rings.across, packed, ends, tag, combine)
        rings.unpack(packed, [rings.host])
        key.count(REDUCED, len(extra))
        return totals
    ring_stages = RingStages(
        rings.across, totals, steps, tag, LINK_WINDOW, reducing=True, ready=lambda: add_ranks.count, combine=combine
    )
    n_leaders_own = len(segments) - len(extra)
    stages += [
        ring_stages.receiver,
        ring_stages.sender,
        _PublishCount(key, REDUCED, extra, lambda: ring_stages.count() - n_leaders_own),
    ]
    yield from drive(*stages)
    return totals


def allgather(
    group: Group, chunks: Sequence[int], tag: int, key: HostKey, outs: Sequence[HostArray] = ()
) -> Steps[None]:
    """Complete the host's result: chunk i of it is rank i's at the start, on all hosts at the end; copy it to `outs`.

    outs: (n,), contiguous, any dtype. Collective. Yields each request it must wait for.
    """
    rings = HostRings(group, key.value, chunks, tag)

    def drain(span: Span) -> None:
        for out in outs:
            out[span[0] : span[1]] = rings.view(span)

    segments = {
        ring: [span for step in rings.steps(ring, reducing=False) for span in step] for ring in range(rings.n_rings)
    }
    own = segments.pop(rings.local_rank, [])
    others = _AwaitCounts(key, GATHERED, segments, drain)
    if not rings.is_leader:
        key.count(UPDATED, 1)
        yield from drive(others)
        return
    extra_updates = _AwaitExtraUpdates(key, rings.extra_segments())
    if rings.short:
        yield from drive(extra_updates)
        packed, ends = rings.packed()
        yield from rings.direct().allgather(rings.across, packed, ends, tag)
        rings.unpack(packed, range(rings.n_hosts))
        yield from drive(_PublishCount(key, GATHERED, own, lambda: len(own), drain), others)
        return
    steps = rings.steps(rings.local_rank, reducing=False)
    n_own = len(steps[0]) - len(rings.extra_segments())

    def ready() -> int:
        return len(own) if extra_updates.done else n_own + extra_updates.count

    ring_stages = RingStages(rings.across, key.value, steps, tag, LINK_WINDOW, reducing=False, ready=ready)
    yield from drive(
        extra_updates,
        ring_stages.receiver,
        ring_stages.sender,
        _PublishCount(key, GATHERED, own, ring_stages.count, drain),
        others,
    )
