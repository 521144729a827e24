"""The strategy of keys that go round the ring of the workers, or through the memory of their host.

A push adds the gradient to the key's queue. A queue does one round after another. A round is a reduce-scatter, after
which each worker holds the sum of the shard it owns; the optimizer on that shard; and an allgather of the new values.
This is an allreduce with the optimizer in the middle, whose state exists once over all workers. A pull waits until the
queue has done the round of this worker's last push, and copies the value out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.collectives.nccl import NcclComm
from mpikv.common.checks import shown
from mpikv.engine.operation import Predicate
from mpikv.engine.running import Running
from mpikv.errors import ConfigError
from mpikv.hostmemory.segment import HostMemory
from mpikv.observe.stall import Waiting
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import StatesFile, records_from_bytes, records_to_bytes
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import PushLabel, scaled
from mpikv.placement.members import Members
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import HOST
from mpikv.strategies.base import Entry, PreparedCall, Sink, address_of, wait_for_all
from mpikv.strategies.divided_path import Speaker
from mpikv.strategies.placed_keys import PlacedKeys
from mpikv.strategies.queues import Delivery, Round, RoundQueue
from mpikv.strategies.states import LOAD, SAVE, collect, distribute
from mpikv.strategies.workers import WorkersStrategy


def _is_delivery_s(one: Pending, error: ConfigError) -> bool:
    return isinstance(one.request, Delivery) and one.request.error is error


class QueuedCall(PreparedCall):
    """A call through the keys' queues: a push appends a round to the key's queue, a pull waits until it is done.

    A caller that lends its arrays does not change them until the call has ended. A round can then add in the caller's
    arrays, of values or of results, and needs no buffer of its own. This saves time for large values: the first use of
    new memory takes several times as long as a copy, and nothing is sent meanwhile.
    """

    def __init__(self, keys: PlacedKeys, session: Workers, entries: Sequence[Entry], op: Reduction) -> None:
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
                    dtype = queue.paths.dtype if outs is None and info.space == HOST else None
                    value = scaled(queue.space, value, under.ratio, dtype)
                if outs is not None:
                    round_, sink = self._lent_round(queue, info, value, under, outs)
                    round_ = round_._replace(op=op, priority=priority)
                else:
                    cast = value.dtype != queue.paths.dtype and info.space == HOST
                    total = queue.space.cast(value, queue.paths.dtype) if cast else value
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
        paths, spaces = queue.paths, self._session.spaces
        if value.dtype != paths.dtype:
            return Round(queue.space.cast(value, paths.dtype), under), Sink(info, outs, spaces)  # copied anyway
        in_place = any(address_of(value) == address_of(out) for out in outs)
        if paths.value_is_shared:
            return Round(value, under, borrowed=True, changeable=in_place, outs=outs), Sink(info, (), spaces)
        if in_place or not paths.usual.overwrites:
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
        return Pending(delivery, Waiting(call, info.key, info.id, self._keys.pushed(info), queue.paths.usual.servers))


class AllreduceStrategy(WorkersStrategy):
    """One of the two ways of the keys of a `dist_sync` store; the other is `PsStrategy`."""

    def __init__(
        self,
        session: Workers,
        members: Members,
        memory: HostMemory | None = None,
        *,
        nccl: NcclComm | None = None,
        speaker: Speaker | None = None,
    ) -> None:
        """speaker: where servers own parts of keys."""
        super().__init__(session)
        self.keys = PlacedKeys(session, members, memory, nccl=nccl, speaker=speaker)
        self.keys.first_values = self.first_values
        self.events = self.keys.events
        self._queues = self.keys.queues
        self._blobs: list[bytes] = []  # at worker 0, the states that each worker gets of a file

    # --- keys

    def wait_for_values(self, agreed: Sequence[KeyInfo]) -> None:
        for info in agreed:
            queue = self._queues.get(info.id)
            if queue is None or self._session.is_released(info):
                continue  # it has other owners; a released key may be gone already
            if not queue.has_value:
                self._session.wait(Pending(queue.at(0), Waiting("init", info.key, info.id)))

    # --- push and pull

    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        """Take the direct path if it is that of all keys and the caller lends its arrays; else the keys' queues."""
        queued = QueuedCall(self.keys, self._session, entries, op)
        if (
            op.whole
            or not waits
            or (direct := self.keys.direct) is None
            or any(entry.outs is None for entry in entries)
        ):
            return queued
        if {self._queues[entry.info.id].placement.path for entry in entries} != {"direct"}:
            return queued
        return direct.prepare(entries, op, queued) or queued

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        found = self.reserve(n_bytes)
        begin = self._session.agree("empty", [text, None if found is None else found[1]], "empty")
        hosts = self.keys.hosts
        return None if hosts is None or begin is None else hosts.array(begin, n_bytes)

    def reserve(self, n_bytes: int) -> tuple[HostMemory, int | None] | None:
        hosts = self.keys.hosts
        if hosts is None:
            return None
        return hosts.memory, hosts.reserve_arrays(n_bytes) if self._session.rank == 0 else None

    def stats(self) -> dict[str, Any]:
        held: dict[str, Any] = {"held_bytes": sum(queue.held_bytes for queue in self.keys.all())}
        if self.keys.hosts is not None:
            shared = (queue for queue in self.keys.all() if queue.info.space == HOST and queue.paths.shared)
            held["shared_bytes"] = sum(queue.info.n_bytes for queue in shared)
        if self.keys.direct is not None:
            direct = self.keys.direct.stats()
            held = {**held, **direct, "held_bytes": held["held_bytes"] + direct["held_bytes"]}
        return held

    # --- optimizers

    def use_optimizer(self, slot: int, pickled: bytes, key_ids: list[int], *, elementwise: bool) -> None:
        self.keys.set_optimizer(slot, cloudpickle.loads(pickled), key_ids)

    def use_attributes(self, slot: int, attributes: dict[str, Any], key_ids: list[int]) -> None:
        self.keys.set_optimizer(slot, attributes, key_ids)

    def settle(self, call: str) -> None:
        """Wait until all rounds that this worker has pushed are done; before the end, all workers agree first."""
        if call != "close":
            self.keys.drain(call)

    # --- states

    def settle_all(self, call: str) -> None:
        self.settle(call)
        if call == SAVE:
            self._session.agree(SAVE, None, SAVE)  # wait until all workers are ready to send their states

    def _owned(self, rank: int) -> list[tuple[KeyInfo, int, int]]:
        """The shard of each key that a worker owns; begin equals end where it owns none."""
        return [
            (self._session.infos[queue.info.key], queue.bounds[rank], queue.bounds[rank + 1])
            for queue in self.keys.all()
        ]

    def gather_states(self) -> Callable[[], list[list[StateRecord]]]:
        mine = collect(self.keys.owner, self._owned(self._session.rank))
        gathered = self._session.gather(SAVE, records_to_bytes(mine))
        return lambda: [records_from_bytes(blob) for blob in gathered]

    def send_states(self, file: StatesFile) -> None:
        """Worker 0 cuts the states; they are sent when all know that the file is good."""
        owned = (self._owned(rank) for rank in range(self._session.num_workers))
        self._blobs = [records_to_bytes(distribute(file, shards)) for shards in owned]

    def take_states(self, replaced: Sequence[KeyInfo]) -> None:
        mine = records_from_bytes(self._session.scatter(LOAD, self._blobs))
        self._blobs = []
        with self._session.engine.lock:
            for info in replaced:
                self.keys.owner.states.pop(info.id, None)
            for part in mine:
                self.keys.owner.set_state(self._session.infos[part.key], part.state)

    # --- the end

    def leave(self, common: Mapping[int, int]) -> ConfigError | None:
        refused: ConfigError | None = None
        try:
            self.keys.drain("close", common)
        except ConfigError as found:
            refused = found
        return refused

    def free(self) -> None:
        if self.keys.communicators is not None:
            self._session.wait_for(Predicate(self.keys.communicators.all_made), "close")
            self.keys.communicators.free()
        if self.keys.nccl is not None:
            self.keys.nccl.close()
