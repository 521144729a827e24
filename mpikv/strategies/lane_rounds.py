"""The rounds of a lane, one after another: reduce-scatter, the optimizer on what this worker owns, allgather.

The messages say under which labels values were pushed (collectives/labelled). In a round whose labels differ in what
must be equal nobody updates anything, and all workers ask who has brought what (session/contests). A generator for the
progress engine; it ends when the lane is empty, and the next push starts another. Which collective does the two halves
is the lane's choice; where a host's workers share memory, each round goes through it (collectives/hosted).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpikv import wire
from mpikv.arrays import HostArray
from mpikv.collectives import hosted
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.host_key import HostKey
from mpikv.collectives.select import ALGORITHMS
from mpikv.engine.request import Predicate, Steps
from mpikv.engine.running import Running
from mpikv.optimizers.owner import Owner
from mpikv.session.contests import Dispute, Labels
from mpikv.strategies.lanes import Lane, Round
from mpikv.transports.base import Group


class LaneRounds:
    """What the rounds of all lanes of a worker need.

    dispute: brings the labels of a round to worker 0. native: the module of MPI's own collectives, where they are used,
    and the communicators of keys that they run on.
    """

    def __init__(
        self,
        group: Group,
        owner: Owner,
        dispute: Callable[[int, int, Labels], Dispute],
        *,
        native: Any = None,
        comms: Mapping[int, Running[Any]] | None = None,
    ) -> None:
        self._group, self._owner, self._dispute = group, owner, dispute
        self._native, self._comms = native, {} if comms is None else comms

    def run(self, lane: Lane) -> Steps[None]:
        """Do what is in the lane; ends when it is empty."""
        if not lane.has_value:
            tag = wire.key_tag(lane.info.id, 0)
            if lane.shared is not None:
                yield from hosted.share(self._group, lane.shared, tag)
            else:
                yield from broadcast(self._group, lane.own, 0, tag)
            if self._native is not None:
                # There once all workers agreed on the key, which may be after `init` has returned.
                yield Predicate(lambda: lane.info.id in self._comms)
                yield self._comms[lane.info.id]
                lane.comm = self._comms[lane.info.id].result
            lane.has_value = True
            lane.deliver()
        while lane.queue:
            round_ = lane.queue[0]
            if lane.comparison is not None:
                lane.comparison.begin(lane.labels(round_.under))
            if self._native is not None:
                yield from self._native_round(lane, round_)
            elif lane.shared is not None:
                yield from self._shared_round(lane, lane.shared, round_)
            else:
                module, bounds = ALGORITHMS[lane.placement.algorithm], lane.bounds
                buf, tags = round_.values, [wire.key_tag(lane.info.id, half) for half in (1, 2)]
                yield from module.reduce_scatter(lane.adding, buf, bounds, tags[0], round_.op.combine)
                self._apply(lane, buf, round_)
                yield from module.allgather(lane.sharing, lane.own, bounds, tags[1])
            if lane.comparison is not None and lane.comparison.wrong:
                dispute = self._dispute(lane.info.id, lane.done, lane.labels(round_.under))  # as all workers do
                yield dispute
                error = dispute.error(f"key {lane.info.key!r}", lane.round, exact=lane.info.dtype.kind in "iu")
                lane.refuse(error)
                raise error
            lane.queue.popleft()
            lane.finish(round_.values)
            lane.deliver()

    def _native_round(self, lane: Lane, round_: Round) -> Steps[None]:
        buf = round_.values
        if lane.comparison is not None:
            ratio = yield from self._native.ratio(lane.comm, lane.comparison)
            if ratio != 1.0:
                buf *= buf.dtype.type(ratio)
        yield from self._native.reduce_scatter(lane.comm, buf, lane.bounds, round_.op.combine)
        self._apply(lane, buf, round_)
        yield from self._native.allgather(lane.comm, lane.own, lane.bounds)

    def _shared_round(self, lane: Lane, shared: HostKey, round_: Round) -> Steps[None]:
        key_id, bounds = lane.info.id, lane.bounds
        totals = yield from hosted.reduce_scatter(
            lane.adding,
            round_.values,
            bounds,
            wire.key_tag(key_id, 1),
            shared,
            changeable=round_.changeable,
            combine=round_.op.combine,
            comparison=lane.comparison,
        )
        self._apply(lane, totals, round_)
        yield from hosted.allgather(lane.sharing, bounds, wire.key_tag(key_id, 2), shared, round_.outs)

    def _apply(self, lane: Lane, totals: HostArray, round_: Round) -> None:
        begin, end = lane.bounds[self._group.rank], lane.bounds[self._group.rank + 1]
        comparison = lane.comparison
        if begin == end or (comparison is not None and comparison.wrong):
            return  # what is handed round then is the old value
        factor = comparison.units if comparison is not None and comparison.mixed else None
        round_.op.finish(totals[begin:end], self._group.size)
        lane.apply(self._owner, totals, round_.under, (begin, end), factor)
