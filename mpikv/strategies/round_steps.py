"""The rounds of a queue, one after another: reduce-scatter, the optimizer on what this worker owns, allgather.

How values travel, the key's path says (key_path.py), and which path a round goes, the key's `KeyPaths` (paths.py).
Values of a key on a GPU whose path adds on the host are copied there and back while the path works (staging.py). In a
round whose labels differ nobody updates anything, and worker 0 tells all of them who has brought what. A generator for
the progress engine; it ends when the queue is empty, and the next push starts another.
"""

from __future__ import annotations

from collections.abc import Callable

from mpikv.engine.operation import Steps
from mpikv.errors import ConfigError
from mpikv.optimizers.owner import Owner
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison, Labels
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.key_path import KeyPath
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
        paths, codec = queue.paths, queue.paths.codec
        if not queue.has_value:
            yield from paths.share()
            queue.has_value = True
            queue.deliver()
        if queue.waiting and queue.comparison is None:  # keys that go the direct path alone never need it
            queue.comparison = self._comparison(queue)
        comparison = queue.comparison
        while queue.waiting:
            round_ = queue.waiting[0]
            self._priorities[queue.info.id] = round_.priority
            if comparison is not None:
                comparison.begin(queue.labels(round_.under))
            path = paths.begin(plain=round_.plain)
            values = brought = round_.values
            if queue.space.device is not None:
                values = brought = yield from queue.brought(round_)
            changeable, outs = round_.changeable, round_.outs
            if codec is not None and path is paths.plain:
                values, changeable = self._as_they_are(queue, path, values, changeable=changeable)
            if (staging := path.staging) is None:
                totals = yield from path.begin(values, round_.op.combine, comparison, changeable=changeable)
            else:
                with staging.first_half(values, path.updates) as on_host:
                    yield from path.begin(on_host, round_.op.combine, comparison, changeable=True)
                totals = None
            self._apply(queue, path, values if totals is None else totals, round_)
            if staging is not None:
                with staging.second_half(path.value):
                    yield from path.end((), comparison)
            else:
                if path.value is not queue.own:  # it is completed in the memory of the host, and copied home
                    own = slice(*path.updates)
                    path.value[own] = queue.own[own]
                    outs = (queue.own,)
                yield from path.end(outs, comparison)
            if codec is not None:
                if path is paths.plain:
                    codec.exact = None  # it is in the value
                if codec.measured:
                    yield from paths.end()
            if comparison is not None and comparison.differ:
                error = yield from self._different(queue.info, queue.round, queue.labels(round_.under))
                queue.refuse(error)
                raise error
            queue.waiting.popleft()
            queue.finish(brought)
            queue.deliver()

    @staticmethod
    def _as_they_are(
        queue: RoundQueue, path: KeyPath, values: SpaceArray, *, changeable: bool
    ) -> tuple[SpaceArray, bool]:
        """The values of a round of an encoded key that travels as it is, and whether the path may change them."""
        codec = queue.paths.codec
        assert codec is not None
        given = codec.with_owed(values)
        changeable = changeable or given is not values
        if path.changes and not changeable:
            given, changeable = values.copy(), True
        codec.restore(queue.own, path.updates)
        return given, changeable

    def _apply(self, queue: RoundQueue, path: KeyPath, totals: SpaceArray, round_: Round) -> None:
        begin, end = path.updates
        comparison = queue.comparison
        if begin == end or (comparison is not None and comparison.differ):
            return  # all go on with the old value
        round_.op.finish(totals[begin:end], self._size)
        queue.apply(self._owner, totals, round_.under, (begin, end))
