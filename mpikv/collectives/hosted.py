"""Allreduce for several ranks on some hosts: they add in memory that a host's ranks share, and rings connect the hosts.

It works ring by ring (host_rings.py) and segment by segment. Each rank copies its values into the shared
memory, a segment for every ring in turn. The leader of a ring adds the values of its host's ranks and passes the sums
on around the ring, while later segments are still being copied. Finished segments are received into the result, which
the host holds once, and each rank copies them from there to the arrays of the call. Ranks count what they have done in
counters that the others read (host_key.py), so a rank waits for another only in a round of this key, in whatever order
keys are pushed.

(Ranks that are all on one host: one_host.py.)

Cost for h hosts of c ranks: per rank (c-1)n/c elements copied in, unless the values lie in shared memory, (c-1)n/c
added, n copied out; 2(h-1) steps of n/(hc) elements across the link. Restrictions: ranks with a HostKey.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.host_key import FILLED, GATHERED, REDUCED, TOTALS, UPDATED, VALUES, HostKey
from mpikv.collectives.host_rings import HostRings
from mpikv.collectives.ring import RingStages
from mpikv.collectives.stages import LINK_WINDOW, Span, Stage, drive
from mpikv.engine.operation import Steps, Waiter
from mpikv.hostmemory.sums import in_order, newest_first
from mpikv.placement.labels import Comparison
from mpikv.placement.topology import topology
from mpikv.transports.base import Group

Take = Callable[[Span], None]


def _nothing(span: Span) -> None:
    pass


class _Does:
    """A stage whose generator yields whether it has moved. count: how often it has.

    key: the stage waits for what other ranks of the host count there; None: for no other rank.
    """

    def __init__(self, moves: Iterator[bool], key: HostKey | None = None) -> None:
        self._moves, self._key = moves, key
        self.count, self.done = 0, False

    def move(self) -> bool:
        moved = next(self._moves, None)
        self.done = moved is None
        self.count += bool(moved)
        return bool(moved)

    def wakes(self, waiter: Waiter) -> bool:
        return self._key is None or self._key.wakes(waiter)


def _copy_in(key: HostKey, values: HostArray, segments: Sequence[tuple[int, Span]]) -> Iterator[bool]:
    """Copy this rank's values into shared memory, a segment for each ring in turn, and count them."""
    counts = Counter[int]()
    for ring, (begin, end) in segments:
        key.own[begin:end] = values[begin:end]
        counts[ring] += 1
        key.count(FILLED + ring, counts[ring])
        yield True


def _add_ranks(
    key: HostKey, rings: HostRings, values: HostArray, totals: HostArray, segments: Sequence[Span], *, combine: np.ufunc
) -> Iterator[bool]:
    """Add the segments of a leader's ring over the ranks of its host, in their order from the leader on."""
    next_first = newest_first(combine)  # the next rank's values first, the sum so far second, as with messages
    others = [(rings.local_rank + i) % rings.n_here for i in range(1, rings.n_here)]
    ready = 0  # segments that all ranks had counted when this rank last looked
    for done, (begin, end) in enumerate(segments):
        while done >= ready:
            counts = [key.counted(local_rank, FILLED + rings.local_rank) for local_rank in others]
            ready = min(counts, default=len(segments))
            if done >= ready:
                yield False
        own = values[begin:end]
        total = own if values is totals else totals[begin:end]
        in_order(total, [own, *(key.array_of(one, VALUES)[begin:end] for one in others)], next_first)
        yield True


def _publish(
    key: HostKey, word: int, segments: Sequence[Span], count: Callable[[], int], take: Take = _nothing
) -> Iterator[bool]:
    """Count for the other ranks the segments that another stage has done, `count()`, and call `take` with each."""
    counted = 0
    while counted < len(segments):
        if (now := count()) > counted:
            key.count(word, now)
            for span in segments[counted:now]:
                take(span)
            counted = now
            yield True
        else:
            yield False


def _await(key: HostKey, word: int, segments: Mapping[int, Sequence[Span]], take: Take = _nothing) -> Iterator[bool]:
    """Wait until other ranks have counted all of their segments, and call `take` with each that is counted.

    segments: by local rank, in the order in which that rank counts them.
    """
    taken = dict.fromkeys(segments, 0)
    while left := [one for one, spans in segments.items() if taken[one] < len(spans)]:
        before = sum(taken.values())
        for local_rank in left:
            spans = segments[local_rank]
            counted = min(key.counted(local_rank, word), len(spans))
            for span in spans[taken[local_rank] : counted]:
                take(span)
            taken[local_rank] = counted
        yield sum(taken.values()) > before


def _await_extra(key: HostKey, segments: Sequence[tuple[int, Span]]) -> Iterator[bool]:
    """Wait until the extra ranks have updated their chunks, one segment after another."""
    for local_rank, _ in segments:
        while not key.counted(local_rank, UPDATED):  # counted once, for the whole chunk
            yield False
        yield True


def share(group: Group, key: HostKey, tag: int) -> Steps[None]:
    """Copy the key's value from rank 0's host to every host. Collective; before the first round."""
    if key.value.size == 0:
        return
    found = topology(group.hosts)
    if found.local_rank[group.rank]:
        yield from drive(_Does(_await(key, GATHERED, {0: [(0, key.value.size)]}), key))
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
    rings = HostRings(group, values, chunks)
    shared = key.is_shared(values)
    totals = values if changeable and (shared or not rings.extra_segments()) else key.own
    key.begin(values if shared else key.own, totals, comparison)
    rings.buf = totals
    outgoing = rings.by_ring()
    stages: list[Stage] = []
    if shared:
        for ring in range(rings.n_rings):
            key.count(FILLED + ring, sum(one == ring for one, _ in outgoing))
    else:
        stages.append(_Does(_copy_in(key, values, outgoing)))
    if not rings.is_leader:
        leader = rings.local_rank % rings.n_rings
        owned = bool(rings.extra_chunks[rings.local_rank])
        through = [
            span for local_rank, span in rings.extra_segments(leader) if owned and local_rank <= rings.local_rank
        ]
        stages.append(_Does(_await(key, REDUCED, {leader: through}), key))
        yield from drive(*stages)
        return key.array_of(leader, TOTALS) if owned else values
    steps = rings.steps(rings.local_rank, reducing=True)
    segments = [span for step in steps for span in step]
    add_ranks = _Does(_add_ranks(key, rings, values, totals, segments, combine=combine), key)
    stages.append(add_ranks)
    extra = [span for _, span in rings.extra_segments()]
    ring_stages = RingStages(
        rings.across, totals, steps, tag, LINK_WINDOW, reducing=True, ready=lambda: add_ranks.count, combine=combine
    )
    n_leaders_own = len(segments) - len(extra)
    stages += [
        ring_stages.receiver,
        ring_stages.sender,
        _Does(_publish(key, REDUCED, extra, lambda: ring_stages.count() - n_leaders_own)),
    ]
    yield from drive(*stages)
    return totals


def allgather(
    group: Group, chunks: Sequence[int], tag: int, key: HostKey, outs: Sequence[HostArray] = ()
) -> Steps[None]:
    """Complete the host's result, of which chunk i is rank i's at the start, and copy it to `outs`, of any dtype."""
    rings = HostRings(group, key.value, chunks)

    def drain(span: Span) -> None:
        for out in outs:
            out[span[0] : span[1]] = key.value[span[0] : span[1]]

    segments = {
        ring: [span for step in rings.steps(ring, reducing=False) for span in step] for ring in range(rings.n_rings)
    }
    own = segments.pop(rings.local_rank, [])
    others = _Does(_await(key, GATHERED, segments, drain), key)
    if not rings.is_leader:
        key.count(UPDATED, 1)
        yield from drive(others)
        return
    extra_updates = _Does(_await_extra(key, rings.extra_segments()), key)
    steps = rings.steps(rings.local_rank, reducing=False)
    n_own = len(steps[0]) - len(rings.extra_segments())
    ring_stages = RingStages(
        rings.across, key.value, steps, tag, LINK_WINDOW, reducing=False, ready=lambda: n_own + extra_updates.count
    )
    yield from drive(
        extra_updates,
        ring_stages.receiver,
        ring_stages.sender,
        _Does(_publish(key, GATHERED, own, ring_stages.count, drain)),
        others,
    )
