"""The rounds of a queue, one after another: reduce-scatter, the optimizer on what this worker owns, allgather.

The messages say under which labels values were pushed (collectives/labelled). In a round whose labels differ in what
must be equal nobody updates anything, and all workers ask who has brought what (session/contests). A generator for the
progress engine; it ends when the queue is empty, and the next push starts another. The key's placement says which
collective does the two halves; where a host's workers share memory, each round goes through it (collectives/hosted).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpikv import wire
from mpikv.arrays import HostArray
from mpikv.collectives import hosted, one_host
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.host_key import HostKey
from mpikv.collectives.select import ALGORITHMS
from mpikv.engine.request import Predicate, Steps
from mpikv.engine.running import Running
from mpikv.optimizers.owner import Owner
from mpikv.session.contests import Dispute, Labels
from mpikv.strategies.queues import Round, RoundQueue
from mpikv.transports.base import Group


class RoundSteps:
    """What the rounds of all queues of a worker need.

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
        self._one_host = len(set(group.hosts)) == 1

    def run(self, queue: RoundQueue) -> Steps[None]:
        """Do what is in the queue; ends when it is empty."""
        if not queue.has_value:
            tag = wire.key_tag(queue.info.id, 0)
            if queue.shared is not None and self._one_host:
                yield from one_host.share(queue.shared, self._group.rank)
            elif queue.shared is not None:
                yield from hosted.share(self._group, queue.shared, tag)
            else:
                yield from broadcast(self._group, queue.own, 0, tag)
            if self._native is not None:
                # There once all workers agreed on the key, which may be after `init` has returned.
                yield Predicate(lambda: queue.info.id in self._comms)
                yield self._comms[queue.info.id]
                queue.comm = self._comms[queue.info.id].result
            queue.has_value = True
            queue.deliver()
        while queue.waiting:
            round_ = queue.waiting[0]
            if queue.comparison is not None:
                queue.comparison.begin(queue.labels(round_.under))
            if self._native is not None:
                yield from self._native_round(queue, round_)
            elif queue.shared is not None and self._one_host:
                yield from self._round_here(queue, queue.shared, round_)
            elif queue.shared is not None:
                yield from self._shared_round(queue, queue.shared, round_)
            else:
                module, bounds = ALGORITHMS[queue.placement.algorithm], queue.bounds
                buf, tags = round_.values, [wire.key_tag(queue.info.id, half) for half in (1, 2)]
                yield from module.reduce_scatter(queue.adding, buf, bounds, tags[0], round_.op.combine)
                self._apply(queue, buf, round_)
                yield from module.allgather(queue.sharing, queue.own, bounds, tags[1])
            if queue.comparison is not None and queue.comparison.wrong:
                dispute = self._dispute(queue.info.id, queue.done, queue.labels(round_.under))  # as all workers do
                yield dispute
                error = dispute.error(f"key {queue.info.key!r}", queue.round, exact=queue.info.dtype.kind in "iu")
                queue.refuse(error)
                raise error
            queue.waiting.popleft()
            queue.finish(round_.values)
            queue.deliver()

    def _native_round(self, queue: RoundQueue, round_: Round) -> Steps[None]:
        buf = round_.values
        if queue.comparison is not None:
            ratio = yield from self._native.ratio(queue.comm, queue.comparison)
            if ratio != 1.0:
                buf *= buf.dtype.type(ratio)
        yield from self._native.reduce_scatter(queue.comm, buf, queue.bounds, round_.op.combine)
        self._apply(queue, buf, round_)
        yield from self._native.allgather(queue.comm, queue.own, queue.bounds)

    def _round_here(self, queue: RoundQueue, shared: HostKey, round_: Round) -> Steps[None]:
        rank, combine = self._group.rank, round_.op.combine
        totals = yield from one_host.reduce_scatter(
            rank, round_.values, queue.bounds, shared, combine=combine, comparison=queue.comparison
        )
        self._apply(queue, totals, round_)
        yield from one_host.allgather(rank, queue.bounds, shared, round_.outs)

    def _shared_round(self, queue: RoundQueue, shared: HostKey, round_: Round) -> Steps[None]:
        key_id, bounds = queue.info.id, queue.bounds
        totals = yield from hosted.reduce_scatter(
            queue.adding,
            round_.values,
            bounds,
            wire.key_tag(key_id, 1),
            shared,
            changeable=round_.changeable,
            combine=round_.op.combine,
            comparison=queue.comparison,
        )
        self._apply(queue, totals, round_)
        yield from hosted.allgather(queue.sharing, bounds, wire.key_tag(key_id, 2), shared, round_.outs)

    def _apply(self, queue: RoundQueue, totals: HostArray, round_: Round) -> None:
        begin, end = queue.bounds[self._group.rank], queue.bounds[self._group.rank + 1]
        comparison = queue.comparison
        if begin == end or (comparison is not None and comparison.wrong):
            return  # what is handed round then is the old value
        factor = comparison.units if comparison is not None and comparison.mixed else None
        round_.op.finish(totals[begin:end], self._group.size)
        queue.apply(self._owner, totals, round_.under, (begin, end), factor)
