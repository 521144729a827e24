"""Does the rounds of a queue, one after another: reduce-scatter, the optimizer on this worker's shard, allgather.

The key's path does the reduce-scatter and the allgather (key_path.py); the key's `KeyPaths` choose the path of each
round (paths.py). Where a key is on a GPU but its path adds on the host, values are copied there and back around each
half (host_copies.py). In a round whose labels differ between workers nobody updates anything, and worker 0 sends all of
them the labels that each has pushed. The progress engine runs one generator for each queue that has rounds; it ends
when the queue is empty, and the next push starts another.
"""

from __future__ import annotations

from collections.abc import Callable

from mpikv.engine.operation import Steps
from mpikv.errors import ConfigError
from mpikv.observe.recorder import Recorder
from mpikv.optimizers.owner import Owner
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison, Labels
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.key_path import KeyPath
from mpikv.strategies.queues import Round, RoundQueue, bytes_of


class RoundSteps:
    """Makes the generators of all queues of a worker.

    size: the number of workers. comparison: makes a queue's comparison of labels; None: there is nothing to compare.
    different: makes the error of a round whose labels differ (`Workers.different`). priorities: of each queue's current
    round, by the queue's number; written before the round sends anything. recorder: gets the parts of each round.
    """

    def __init__(
        self,
        size: int,
        owner: Owner,
        comparison: Callable[[RoundQueue], Comparison | None],
        different: Callable[[KeyInfo, int, Labels], Steps[ConfigError]],
        *,
        priorities: dict[int, int],
        recorder: Recorder,
    ) -> None:
        self._size, self._owner = size, owner
        self._comparison, self._different, self._priorities = comparison, different, priorities
        self._recorder = recorder

    def run(self, queue: RoundQueue) -> Steps[None]:
        """Do the rounds of a queue until it is empty. First of all, broadcast the key's first value if it has none."""
        paths, codec = queue.paths, queue.paths.codec
        if not queue.has_value:
            yield from paths.broadcast()
            queue.has_value = True
            queue.deliver()
        if queue.waiting and queue.comparison is None:  # not needed by keys whose calls all take the direct path
            queue.comparison = self._comparison(queue)
        comparison, recorder = queue.comparison, self._recorder
        while queue.waiting:
            round_ = queue.waiting[0]
            part = recorder.begin(queue, queue.done + 1, bytes_of(round_)) if recorder.on else None
            self._priorities[queue.info.id] = round_.priority
            if comparison is not None:
                comparison.begin(queue.labels(round_.under))
            path = paths.begin_round(round_, uncompressed=round_.uncompressed)
            values = buf = round_.values
            if queue.space.device is not None:
                values = buf = yield from queue.device_values(round_)
            changeable, outs = round_.changeable, round_.outs
            if codec is not None and path is paths.uncompressed:
                values, changeable = self._uncompressed_values(queue, path, values, changeable=changeable)
            added = values
            if (copies := path.copies) is not None:
                added = yield from copies.values(values)
            totals = yield from path.reduce_scatter(
                added, round_.op.combine, comparison, changeable=changeable or copies is not None
            )
            totals = added if totals is None else totals
            if copies is not None:
                totals = copies.totals(totals, path.updates, values, changeable=changeable)
            if part is not None:
                part.done("reduce-scatter")
            self._apply(queue, path, totals, round_)
            if part is not None:
                part.done("update")
            if copies is not None:
                outs = yield from copies.updated(path)
            elif path.value is not queue.stored:  # the path completes it elsewhere and copies it to `queue.stored`
                own = slice(*path.updates)
                path.value[own] = queue.stored[own]
                outs = (queue.stored,)
            yield from path.allgather(outs, comparison)
            if copies is not None:
                copies.complete(path)
            if part is not None:
                part.done("allgather")
            if codec is not None and path is not paths.usual:
                codec.exact = None  # the value itself is exact again
            if comparison is not None and comparison.differ:
                error = yield from self._different(queue.info, queue.round, queue.labels(round_.under))
                queue.refuse(error)
                raise error
            queue.waiting.popleft()
            queue.finish(buf)
            queue.deliver()
            if part is not None:
                part.done("copy")

    @staticmethod
    def _uncompressed_values(
        queue: RoundQueue, path: KeyPath, values: SpaceArray, *, changeable: bool
    ) -> tuple[SpaceArray, bool]:
        """The values of an uncompressed round of a key with a codec, and whether the path may overwrite them."""
        codec = queue.paths.codec
        assert codec is not None
        if path.overwrites and not changeable:
            values, changeable = values.copy(), True
        codec.restore_exact(queue.stored, path.updates)
        return values, changeable

    def _apply(self, queue: RoundQueue, path: KeyPath, totals: SpaceArray, round_: Round) -> None:
        begin, end = path.updates
        comparison = queue.comparison
        if begin == end or (comparison is not None and comparison.differ):
            return  # all workers keep the old value
        round_.op.finish(totals[begin:end], self._size)
        queue.apply(self._owner, totals, round_.under, (begin, end))
