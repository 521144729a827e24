"""The rounds of a queue, one after another: reduce-scatter, the optimizer on what this worker owns, allgather.

How values travel, the key's way says (ways.py). In a round whose labels differ in what must be equal nobody updates
anything, and worker 0 tells all of them who has brought what. A generator for the progress engine; it ends when
the queue is empty, and the next push starts another.
"""

from __future__ import annotations

from collections.abc import Callable

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.request import Steps
from mpikv.errors import ConfigError
from mpikv.optimizers.owner import Owner
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison, Labels
from mpikv.strategies.queues import Round, RoundQueue


class RoundSteps:
    """What the rounds of all queues of a worker need.

    size: how many workers there are. comparison: makes that of a queue's labels; None: there is nothing to compare.
    different: what is raised for a round of a queue whose labels differ (`Workers.different`). priorities: where the
    priority of a queue's round is written, by the queue's number, before the round sends anything.
    """

    def __init__(
        self,
        size: int,
        owner: Owner,
        comparison: Callable[[RoundQueue], Comparison | None],
        different: Callable[[KeyInfo, int, Labels], Steps[ConfigError]],
        *,
        priorities: dict[int, int],
    ) -> None:
        self._size, self._owner = size, owner
        self._comparison, self._different, self._priorities = comparison, different, priorities

    def run(self, queue: RoundQueue) -> Steps[None]:
        """Do what is in the queue; ends when it is empty."""
        way = queue.way
        if not queue.has_value:
            yield from way.share()
            queue.has_value = True
            queue.deliver()
        if queue.waiting and queue.comparison is None:  # keys that go the direct way alone never need it
            queue.comparison = self._comparison(queue)
        comparison = queue.comparison
        while queue.waiting:
            round_ = queue.waiting[0]
            self._priorities[queue.info.id] = round_.priority
            if comparison is not None:
                comparison.begin(queue.labels(round_.under))
            way.begin(plain=round_.plain)
            values = round_.values
            if queue.space.device is not None:
                values = yield from queue.brought(round_)
            totals = yield from way.reduce_scatter(values, round_.op.combine, comparison, changeable=round_.changeable)
            self._apply(queue, values if totals is None else totals, round_)
            yield from way.allgather(round_.outs, comparison)
            if comparison is not None and comparison.differ:
                error = yield from self._different(queue.info, queue.round, queue.labels(round_.under))
                queue.refuse(error)
                raise error
            queue.waiting.popleft()
            queue.finish(values)
            queue.deliver()

    def _apply(self, queue: RoundQueue, totals: HostArray, round_: Round) -> None:
        begin, end = queue.way.updates
        comparison = queue.comparison
        if begin == end or (comparison is not None and comparison.differ):
            return  # what is handed round then is the old value
        round_.op.finish(totals[begin:end], self._size)
        queue.apply(self._owner, totals, round_.under, (begin, end))
