"""Does the rounds of a queue, one after another: reduce-scatter, the optimizer on this worker's shard, allgather.

The key's path does the reduce-scatter and the allgather (key_path.py); the key's `KeyPaths` choose the path of each
round (paths.py). Where a key is on a GPU but its path adds on the host, values are copied there and back around each
half (host_copies.py). In a round whose labels differ between workers nobody updates anything, and worker 0 sends all of
them the labels that each has pushed. The progress engine runs one generator for each queue that has rounds; it ends
when the queue is empty, and the next push starts another.
"""

from __future__ import annotations

from mpikv.engine.operation import Steps
from mpikv.optimizers.owner import Owner
from mpikv.placement.labels import Comparison
from mpikv.session.workers import Workers
from mpikv.strategies.queues import RoundQueue, bytes_of


def rounds(queue: RoundQueue, session: Workers, owner: Owner) -> Steps[None]:
    """Do the rounds of a queue until it is empty. First of all, broadcast the key's first value if it has none."""
    paths, codec = queue.paths, queue.paths.codec
    if not queue.has_value:
        yield from paths.broadcast()
        queue.has_value = True
        queue.deliver()
    if queue.waiting and queue.comparison is None:  # not needed by keys whose calls all take the direct path
        queue.comparison = _comparison(queue, session)
    comparison, recorder = queue.comparison, session.recorder
    while queue.waiting:
        round_ = queue.waiting[0]
        part = recorder.begin(queue, queue.done + 1, bytes_of(round_)) if recorder.on else None
        session.priorities[queue.info.id] = round_.priority
        if comparison is not None:
            comparison.begin(queue.labels(round_.under))
        path = paths.begin_round(round_, uncompressed=round_.uncompressed)
        values = buf = round_.values
        if queue.space.device is not None:
            values = buf = yield from queue.device_values(round_)
        changeable, outs = round_.changeable, round_.outs
        if codec is not None and path is paths.uncompressed:
            if path.overwrites and not changeable:
                values, changeable = values.copy(), True
            codec.restore_exact(queue.stored, path.updates)
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
        begin, end = path.updates
        if begin != end and (comparison is None or not comparison.differ):  # else all workers keep the old value
            round_.op.finish(totals[begin:end], session.num_workers)
            queue.apply(owner, totals, round_.under, (begin, end))
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
            error = yield from session.different(queue.info, queue.round, queue.labels(round_.under))
            queue.refuse(error)
            raise error
        queue.waiting.popleft()
        queue.finish(buf)
        queue.deliver()
        if part is not None:
            part.done("copy")


def _comparison(queue: RoundQueue, session: Workers) -> Comparison | None:
    """Make the comparison of a queue's labels; None where there is no other worker or no element."""
    if session.num_workers == 1 or not queue.info.n_elems:
        return None
    return Comparison(tuple(session.attributes.as_set(session.slot_of(info)) for info in queue.keys))
