"""A call of keys that go round the ring of the workers, or through the memory of their host.

A push appends a round to the key's queue. A pull waits until the queue has done the round of this worker's last push,
and copies the value out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
from mpikv.strategies.base import Entry, PreparedCall, Sink, address_of, wait_for_all
from mpikv.strategies.queues import Delivery, Round, RoundQueue

if TYPE_CHECKING:
    from mpikv.strategies.ring_keys import RingKeys


def _is_delivery_s(one: Pending, error: ConfigError) -> bool:
    return isinstance(one.request, Delivery) and one.request.error is error


class QueuedCall(PreparedCall):
    """One call.

    A caller that lends its arrays does not change them until the call has ended. A round can then add in the caller's
    arrays, of values or of results, and needs no buffer of its own. This saves time for large values: the first use of
    new memory takes several times as long as a copy, and nothing is sent meanwhile.
    """

    def __init__(self, keys: RingKeys, session: Workers, entries: Sequence[Entry], op: Reduction) -> None:
        self._keys, self._session, self._entries, self._op = keys, session, entries, op
        # In reports of a wait: in such a round labels are not compared, and another op on another worker is a stall.
        self._name = f"pushpull(op={op.name!r})" if op.whole else "pushpull"

    def start(self, priority: int = 0) -> list[Pending]:
        """Append a round to the queue of each pushed key. A pull is done when this worker's last push of it is."""
        pending, keys, engine, op = [], self._keys, self._session.engine, self._op
        for info, pushed, target, outs in self._entries:
            queue, round_, sink, value = keys.queues[info.id], None, target, pushed
            if value is not None:
                under = self._session.under(info)
                if under.ratio != 1.0:
                    dtype = queue.path.dtype if outs is None and info.space == HOST else None
                    value = scaled(queue.space, value, under.ratio, dtype)
                if outs is not None:
                    round_, sink = self._lent_round(queue, info, value, under, outs)
                    round_ = round_._replace(op=op, priority=priority)
                else:
                    cast = value.dtype != queue.path.dtype and info.space == HOST
                    total = queue.space.cast(value, queue.path.dtype) if cast else value
                    round_ = Round(total, under, op=op, priority=priority)
            with engine.lock:  # held for both: once released, another thread may hold it for milliseconds
                if round_ is not None:
                    running = self._push(queue, info, round_)
                    if running is not None:
                        queue.running = engine.take(running)
                if sink is not None:
                    pending.append(self._deliver(queue, info, sink, "pull" if round_ is None else self._name))
        return pending

    def wait(self, pending: Sequence[Pending]) -> None:
        wait_for_all(self._session, pending, _is_delivery_s)

    def release(self) -> None:
        self.valid, self._entries = False, ()

    def _lent_round(
        self, queue: RoundQueue, info: KeyInfo, value: SpaceArray, under: PushLabel, outs: tuple[HostArray, ...]
    ) -> tuple[Round, Sink]:
        """The round of a key whose arrays are lent, and the sink for results that the round itself does not write."""
        path, spaces = queue.path, self._session.spaces
        if value.dtype != path.dtype:
            return Round(queue.space.cast(value, path.dtype), under), Sink(info, outs, spaces)  # copied anyway
        in_place = any(address_of(value) == address_of(out) for out in outs)
        if path.shared:
            return Round(value, under, borrowed=True, changeable=in_place, outs=outs), Sink(info, (), spaces)
        if in_place or not path.overwrites:
            return Round(value, under, borrowed=True, changeable=in_place), Sink(info, outs, spaces)
        queue.space.copy(outs[0], value)
        return Round(outs[0], under, borrowed=True), Sink(info, outs, spaces)

    # Under the engine's lock:

    def _push(self, queue: RoundQueue, info: KeyInfo, round_: Round) -> Running[None] | None:
        """Append a round to its queue. Returns a new `Running` that does the queue's rounds; None: one runs already."""
        session, under = self._session, round_.under
        try:
            queue.reached(0)
        except Exception as error:
            session.given.note(error, (info.id,))
            raise
        if round_.op is not SUM:
            under = under._replace(label=under.label._replace(op=round_.op.name))
        part = None
        if session.recorder.on:
            part = session.recorder.begin(queue, queue.done + len(queue.waiting) + 1, int(round_.values.nbytes))
        queue.add(round_._replace(under=under))
        if part is not None:
            part.done("push")
        if self._keys.direct is not None:
            self._keys.direct.note_push(queue)
        session.activity.note(f"push of key {shown(info.key)}")
        return self._keys.new_running(queue)

    def _deliver(self, queue: RoundQueue, info: KeyInfo, sink: Sink, call: str) -> Pending:
        """Write out the value after this worker's last push, now or when its queue has done that round."""
        delivery = Delivery(queue, sink)
        if queue.refused is not None:
            # The wait raises the error, not this call, which must still push its other keys as other workers do.
            queue.refuse_pull(delivery)
        elif queue.reached(delivery.round):
            delivery.write(queue.value())
        else:
            queue.deliveries.append(delivery)
        return Pending(delivery, Waiting(call, info.key, info.id, self._keys.pushed(info), queue.path.servers))
