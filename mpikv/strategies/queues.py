"""The queue of a key: its value, and the rounds that this worker has pushed, which are done one after another.

A push appends a round to its key's queue. The progress engine runs one generator (`rounds`) for each queue that has
rounds; it ends when the queue is empty, and the next push starts another.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.collectives import adasum
from mpikv.common.checks import shown
from mpikv.common.digests import digest
from mpikv.engine.operation import Predicate, Steps
from mpikv.engine.running import Running
from mpikv.errors import ConfigError
from mpikv.optimizers.owner import Owner
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import NO_OPTIMIZER, Comparison, PushLabel
from mpikv.placement.placement import Placement
from mpikv.session.workers import Workers
from mpikv.spaces.base import Space, SpaceArray
from mpikv.strategies.base import Sink
from mpikv.strategies.key_path import KeyPath
from mpikv.transports import wire

if TYPE_CHECKING:
    from mpikv.strategies.direct import DirectCall


class Round(NamedTuple):
    """One push of a queue's values.

    values: in the dtype of the queue's path, unless they are on a GPU. under: what they were pushed under (labels.py).
    borrowed: whether `values` is the caller's array. changeable: whether the round may overwrite it. outs: the caller's
    arrays that the round writes the value to.
    """

    values: SpaceArray
    under: PushLabel = NO_OPTIMIZER
    borrowed: bool = False
    changeable: bool = True
    outs: tuple[HostArray, ...] = ()
    op: Reduction = SUM
    priority: int = 0


class KeyDirectCalls:
    """Those of one key (direct.py). copied_at: the number of the event that last put the value at the key's place."""

    __slots__ = ("_key_id", "copied_at", "digest", "kept", "released_rounds")

    def __init__(self, key_id: int) -> None:
        self._key_id, self.digest = key_id, digest("key", key_id)
        self.kept: list[DirectCall] = []
        self.released_rounds = self.copied_at = 0

    @property
    def rounds(self) -> int:
        return self.released_rounds + sum(call.rounds for call in self.kept)

    @property
    def newest(self) -> DirectCall | None:
        """The call made last, if its arrays still hold the key's newest value and nothing has copied it out since."""
        last = max(self.kept, key=lambda call: call.last, default=None)
        return last if last is not None and last.values and last.last > self.copied_at else None

    def array(self) -> HostArray | None:
        """The newest value, if it is in the arrays of a call."""
        newest = self.newest
        return None if newest is None else newest.values[self._key_id]


class RoundQueue:
    """The queue of one key.

    stored: where the path keeps the value; a direct call may have a newer one in its own arrays, see `value`. pushed,
    done: the numbers of rounds. refused: the error of the round after the last one that is done.
    """

    def __init__(self, info: KeyInfo, space: Space, path: KeyPath) -> None:
        self.info, self.space, self.path, self.stored = info, space, path, path.value
        self.direct_calls = KeyDirectCalls(info.id)
        self.waiting: deque[Round] = deque()
        self.pushed = 0
        self.done = 0
        self.has_value = False
        self.comparison: Comparison | None = None  # of labels; None: no round has begun, or there is nothing to compare
        self.running: Running[None] | None = None
        self.refused: ConfigError | None = None
        self.deliveries: list[Delivery] = []

    @property
    def placement(self) -> Placement:
        return self.path.placement

    @property
    def bounds(self) -> tuple[int, ...]:
        return self.path.placement.bounds

    @property
    def round(self) -> int:
        """The number of the current round as the user counts, which includes rounds on the direct path."""
        return self.done + 1 + self.direct_calls.rounds

    @property
    def may_start(self) -> bool:
        return self.running is None or self.running.done

    @property
    def name(self) -> str:
        return f"key {shown(self.info.key)}"

    def __str__(self) -> str:
        return str(self.info.key)

    @property
    def idle(self) -> bool:
        return (
            self.has_value
            and not self.waiting
            and (self.running is None or (self.running.done and self.running.error is None))
        )

    def value(self) -> SpaceArray:
        """The newest value, in `stored` or in a direct call's arrays. Read-only."""
        array = self.direct_calls.array()
        return self.stored if array is None else array

    @property
    def held_bytes(self) -> int:
        queued = sum(int(round_.values.nbytes) for round_ in self.waiting if not round_.borrowed)
        return self.path.held_bytes + (0 if self.path.shared else int(self.stored.nbytes)) + queued

    # --- rounds

    def add(self, round_: Round) -> None:
        self.pushed += 1
        self.waiting.append(round_)

    def at(self, round_: int) -> Predicate:
        """A request that is done when that round is."""
        return Predicate(lambda: self.reached(round_))

    def reached(self, round_: int) -> bool:
        """Whether that round is done. Raises the error of a round that has failed."""
        if self.running is not None and self.running.error is not None:
            raise self.running.error
        return self.has_value and self.done >= round_

    def deliver(self) -> None:
        """Write the value out for all pulls of rounds that are done, before the next round changes it."""
        ready = [delivery for delivery in self.deliveries if delivery.round <= self.done]
        self.deliveries = [delivery for delivery in self.deliveries if delivery.round > self.done]
        for delivery in ready:
            delivery.write(self.value())

    def refuse(self, error: ConfigError) -> None:
        """Refuse the current round, after which no other follows. Waiting pulls get the old value and `error`."""
        self.refused = error
        for delivery in self.deliveries:
            self.refuse_pull(delivery)
        self.deliveries = []

    def refuse_pull(self, delivery: Delivery) -> None:
        """Let a pull of a refused or later round end with the old value and the error."""
        delivery.write(self.value())
        delivery.error = self.refused


class Delivery:
    """The request of a pull. It is done when the queue has done its round and the value has been written out."""

    def __init__(self, queue: RoundQueue, sink: Sink) -> None:
        self.round = queue.pushed
        self._queue, self._sink = queue, sink
        self._done = False
        self.error: Exception | None = None

    def write(self, value: SpaceArray) -> None:
        """Write the queue's value into the caller's arrays.

        An error there concerns this pull alone: it is kept and raised by `test`, and the queue goes on.
        """
        try:
            self._sink.deliver(value)
        except Exception as error:  # noqa: BLE001 - raised by `test`
            self.error = error
        self._done = True

    def test(self) -> bool:
        """Whether the caller's arrays are filled. Raises the error of this pull or of its queue."""
        if self.error is not None:
            raise self.error
        if not self._done:
            self._queue.reached(self.round)
        return self._done


def rounds(queue: RoundQueue, session: Workers, owner: Owner) -> Steps[None]:
    """Do the rounds of a queue until it is empty. First of all, broadcast the key's first value if it has none.

    The key's path does the reduce-scatter and the allgather (key_path.py). In a round whose labels differ between
    workers nobody updates anything, and worker 0 sends all of them the labels that each has pushed.

    A reduction of whole values, of a key that no optimizer updates, has no owners, and no labels are compared: they
    would differ in the op alone, and a worker with another op makes another kind of round. The tag is one that no path
    uses, so both workers wait until their time is over, and the errors name the op. Each worker writes all of the
    result. Where the value is in memory which the workers of a host share, all of them write the same bytes. They need
    not wait for each other there: no worker ends a round before all have begun it, and a worker that has begun a round
    does not read the value of the last one any more.
    """
    path = queue.path
    if not queue.has_value:
        yield from path.broadcast()
        queue.has_value = True
        queue.deliver()
    compares = session.num_workers > 1 and queue.info.n_elems
    if compares and queue.waiting and queue.comparison is None:  # no need of it where all calls take the direct path
        queue.comparison = Comparison(session.attributes.as_set(session.slot_of(queue.info)))
    comparison, recorder = queue.comparison, session.recorder
    while queue.waiting:
        round_ = queue.waiting[0]
        part = recorder.begin(queue, queue.done + 1, int(round_.values.nbytes)) if recorder.on else None
        if comparison is not None:
            comparison.begin(round_.under.label)
        values, op, changeable = round_.values, round_.op, round_.changeable
        if queue.space.device is not None:
            yield queue.space.written(values)  # by the caller's stream: the store's can do other rounds meanwhile
            values = queue.space.cast(values, path.dtype)
        if op.whole:
            tag, (begin, end) = wire.key_tag(queue.info.id, 3), (0, queue.info.n_elems)
            totals = yield from adasum.of_space(session.group, queue.space, values, tag, changeable=changeable)
        else:
            path.begin(round_)
            totals = yield from path.reduce_scatter(values, op.combine, comparison, changeable=changeable)
            totals, (begin, end) = values if totals is None else totals, path.updates
        if part is not None:
            part.done("reduce-scatter")
        if begin != end and (comparison is None or not comparison.differ):  # else all workers keep the old value
            op.finish(totals[begin:end], session.num_workers)
            owner.apply(queue.info, queue.stored[begin:end], totals[begin:end], (0, round_.under.number))
        if part is not None:
            part.done("update")
        if op.whole:
            for out in round_.outs:
                out[...] = queue.stored
        else:
            yield from path.allgather(round_.outs, comparison)
        if part is not None:
            part.done("allgather")
        if comparison is not None and comparison.differ:
            error = yield from session.different(queue.info, queue.round, round_.under.label)
            queue.refuse(error)
            raise error
        queue.waiting.popleft()
        queue.done += 1
        queue.deliver()
        if part is not None:
            part.done("copy")
