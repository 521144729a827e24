"""A call through the keys' queues: each key that is pushed gets one more round, and what is pulled waits for it.

A caller who lends its arrays until the call has ended does not change them meanwhile, so that a round can add where the
values are, or where the result goes, and needs no copy. For large values this counts: the first use of new memory takes
some times as long as the copy, and the link waits for it.

Cost: no copy of a value that is lent and comes back to its place, one into the result otherwise; on a host whose
workers share memory none but theirs (collectives/hosted).
"""

from __future__ import annotations

from collections.abc import Sequence

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.common.checks import shown
from mpikv.engine.running import Running
from mpikv.errors import ConfigError
from mpikv.observe.stall import Waiting
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import PushLabel, scaled
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import HOST
from mpikv.strategies.arguments import address_of
from mpikv.strategies.base import Entry, PreparedCall, Sink
from mpikv.strategies.bucketed import Bucket
from mpikv.strategies.placed_keys import PlacedKeys
from mpikv.strategies.queues import Delivery, Round, RoundQueue


class QueuedCall(PreparedCall):
    """One call, ready to be made. op: what the workers' values become."""

    def __init__(self, keys: PlacedKeys, session: Workers, entries: Sequence[Entry], op: Reduction) -> None:
        self._keys, self._session, self._entries, self._op = keys, session, entries, op

    def start(self, priority: int = 0) -> list[Pending]:
        """Put a round into each key's queue; a pull is done as soon as its queue has done this worker's last push."""
        pending, keys, engine, op = [], self._keys, self._session.engine, self._op
        with self._session.gathering():
            for info, pushed, target, outs in self._entries:
                queue, round_, sink, value = keys.queues[info.id], None, target, pushed
                if value is not None:
                    under = keys.under(info)
                    if under.ratio != 1.0:
                        dtype = queue.paths.dtype if outs is None and info.space == HOST else None
                        value = scaled(queue.space, value, under.ratio, dtype)
                    if outs is not None:
                        round_, sink = self._lent_round(queue, info, value, under, outs)
                        round_ = round_._replace(op=op, priority=priority)
                    else:
                        cast = value.dtype != queue.paths.dtype and info.space == HOST
                        total = queue.space.cast(value, queue.paths.dtype) if cast else value
                        round_ = Round(total, under, op=op, priority=priority)
                with engine.lock:  # for both: once given back, it may be busy for milliseconds
                    if round_ is not None:
                        running = self._push(queue, info, round_)
                        if running is not None:
                            queue.running = engine.take(running)
                    if sink is not None:
                        pending.append(self._deliver(queue, info, sink, "pull" if round_ is None else "pushpull"))
        return pending

    def wait(self, pending: Sequence[Pending]) -> None:
        """Wait for all keys, also where one is refused: arrays of the others are in use until they are done."""
        refused: ConfigError | None = None
        for one in pending:
            try:
                self._session.wait(one, None, pending)
            except ConfigError as error:
                if not isinstance(one.request, Delivery) or one.request.error is not error:
                    raise
                refused = refused or error
        if refused is not None:
            raise refused

    def release(self) -> None:
        """Forget the arrays."""
        self.valid, self._entries = False, ()

    def _lent_round(
        self, queue: RoundQueue, info: KeyInfo, value: SpaceArray, under: PushLabel, outs: tuple[HostArray, ...]
    ) -> tuple[Round, Sink]:
        """The round of a key in arrays of the caller's, and where the result is still to be written to afterwards."""
        paths, spaces = queue.paths, self._session.spaces
        if isinstance(queue, Bucket) or value.dtype != paths.dtype:
            return Round(queue.space.cast(value, paths.dtype), under), Sink(info, outs, spaces)  # copied in any case
        in_place = any(address_of(value) == address_of(out) for out in outs)
        if paths.home_is_shared:
            return Round(value, under, callers=True, changeable=in_place, outs=outs), Sink(info, (), spaces)
        if in_place or not paths.changes:
            return Round(value, under, callers=True, changeable=in_place), Sink(info, outs, spaces)
        queue.space.copy(outs[0], value)
        return Round(outs[0], under, callers=True), Sink(info, outs, spaces)

    # Under the engine's lock:

    def _push(self, queue: RoundQueue, info: KeyInfo, round_: Round) -> Running[None] | None:
        """Put a round into its queue; what does its rounds, if that is to be started now."""
        session, under = self._session, round_.under
        try:
            queue.reached(0)
        except Exception as error:
            session.given.note(error, (one.id for one in queue.keys))
            raise
        if round_.op is not SUM:
            under = under._replace(label=under.label._replace(op=round_.op.name))
        plain = session.compressions.suspended or not round_.op.adds  # sums alone are compressed
        complete = queue.add(info, round_._replace(under=under, plain=plain))
        if self._keys.direct is not None:
            self._keys.direct.pushed(queue)
        session.activity.note(f"push of key {shown(info.key)}")
        return self._keys.due(queue) if complete else None

    def _deliver(self, queue: RoundQueue, info: KeyInfo, sink: Sink, call: str) -> Pending:
        """Bring the value after this worker's last push to where it goes: now, or when its queue has done that."""
        delivery = Delivery(queue, info, sink)
        if queue.refused is not None:
            # Raised by the wait: the other keys of this call may not be pushed yet, and other workers push them.
            queue.refuse_pull(delivery)
        elif queue.reached(delivery.round):
            delivery.take(queue.value())
        else:
            queue.deliveries.append(delivery)
        return Pending(delivery, Waiting(call, info.key, info.id, self._keys.pushed(info)))
