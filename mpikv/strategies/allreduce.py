"""The strategy of synchronous stores without servers: every worker owns a shard of each key.

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
from mpikv.errors import ConfigError, UnsupportedError
from mpikv.hostmemory.segment import HostMemory
from mpikv.observe.stall import Waiting
from mpikv.optimizers.states import StateRecord, record_of
from mpikv.optimizers.states_file import StatesFile, records_from_bytes, records_to_bytes
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import PushLabel, scaled
from mpikv.placement.members import Members
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import DEVICE, HOST
from mpikv.strategies.base import BucketedKeys, Entry, PreparedCall, Sink, address_of, wait_for_all
from mpikv.strategies.bucketed import Bucket, WorkersBuckets, agreed_buckets
from mpikv.strategies.divided_path import Speaker
from mpikv.strategies.pieces import encoded_bytes
from mpikv.strategies.placed_keys import PlacedKeys
from mpikv.strategies.queues import Delivery, Round, RoundQueue
from mpikv.strategies.sparse import RowServer, WorkersRows
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
        with self._session.gathering():
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
        if isinstance(queue, Bucket) or value.dtype != paths.dtype:
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
            session.given.note(error, (one.id for one in queue.keys))
            raise
        if round_.op is not SUM:
            under = under._replace(label=under.label._replace(op=round_.op.name))
        uncompressed = session.compressions.suspended or not round_.op.adds  # only sums are compressed
        part = None
        if session.recorder.on:
            part = session.recorder.begin(queue, queue.done + len(queue.waiting) + 1, int(round_.values.nbytes))
        complete = queue.add(info, round_._replace(under=under, uncompressed=uncompressed))
        if part is not None:
            part.done("push" if complete else "pack")
        if self._keys.direct is not None:
            self._keys.direct.note_push(queue)
        session.activity.note(f"push of key {shown(info.key)}")
        return self._keys.new_running(queue) if complete else None

    def _deliver(self, queue: RoundQueue, info: KeyInfo, sink: Sink, call: str) -> Pending:
        """Write out the value after this worker's last push, now or when its queue has done that round."""
        delivery = Delivery(queue, info, sink)
        if queue.refused is not None:
            # The wait raises the error, not this call, which must still push its other keys as other workers do.
            queue.refuse_pull(delivery)
        elif queue.reached(delivery.round):
            delivery.write(queue.value())
        else:
            queue.deliveries.append(delivery)
        return Pending(delivery, Waiting(call, info.key, info.id, self._keys.pushed(info), queue.paths.usual.servers))


class AllreduceStrategy(WorkersStrategy):
    """The strategy of `dist_sync` without servers."""

    rows: WorkersRows

    def __init__(
        self,
        session: Workers,
        members: Members,
        serve_rows: Callable[[], RowServer],
        memory: HostMemory | None = None,
        *,
        nccl: NcclComm | None = None,
        speaker: Speaker | None = None,
    ) -> None:
        """serve_rows: makes the service that owns this worker's rows. speaker: where servers own parts of keys."""
        super().__init__(session)
        self.rows = WorkersRows(session, serve_rows)
        self.keys = PlacedKeys(session, members, memory, self.rows, nccl=nccl, speaker=speaker)
        self.keys.first_values = self.first_values
        self.events = self.keys.events
        self._queues = self.keys.queues
        self._blobs: list[bytes] = []  # at worker 0, the states that each worker gets of a file

    # --- keys

    def wait_for_values(self, agreed: Sequence[KeyInfo]) -> None:
        for info in agreed:
            queue = self._queues.get(info.id)
            if queue is None or self._session.is_released(info):
                continue  # rows are fetched when they are needed; a released key may be gone already
            if not queue.has_value:
                self._session.wait(Pending(queue.at(0), Waiting("init", info.key, info.id)))

    # --- push and pull

    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        """Take the direct path if it is that of all keys and the caller lends its arrays; else the keys' queues."""
        queued = QueuedCall(self.keys, self._session, entries, op)
        if op.whole:
            for entry in entries:
                if isinstance(queue := self._queues[entry.info.id], Bucket):
                    raise UnsupportedError(
                        f"pushpull of key {shown(entry.info.key)} with op={op.name!r}: the key travels with others "
                        f"as one value ({queue.name}), and {op.name} is of each key by itself: give it another store"
                    )
            return queued
        if not waits or (direct := self.keys.direct) is None or any(entry.outs is None for entry in entries):
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
        if self.rows.any:
            held["row_bytes"] = self.rows.held_bytes
        if self.keys.hosts is not None:
            shared = (queue for queue in self.keys.all() if queue.info.space == HOST and queue.paths.shared)
            held["shared_bytes"] = sum(queue.info.n_bytes for queue in shared)
        if self.keys.direct is not None:
            direct = self.keys.direct.stats()
            held = {**held, **direct, "held_bytes": held["held_bytes"] + direct["held_bytes"]}
        return held | encoded_bytes(codec.pushed for _, codec in self.keys.encoded())

    # --- optimizers

    def use_optimizer(self, slot: int, pickled: bytes, key_ids: list[int], *, elementwise: bool) -> None:
        self.rows.set_optimizer(slot, pickled, key_ids)
        self.keys.set_optimizer(slot, cloudpickle.loads(pickled), key_ids)
        if self.rows.any:  # no rows may arrive at an owner that has not set the optimizer yet
            self._session.agree("set_optimizer in place", None, "set_optimizer")

    def use_attributes(self, slot: int, attributes: dict[str, Any], key_ids: list[int]) -> None:
        self.keys.set_optimizer(slot, attributes, key_ids)

    def settle(self, call: str) -> None:
        """Wait until all rounds that this worker has pushed are done; before the end, all workers agree first."""
        if call != "close":
            self.keys.drain(call)
            self.rows.settle(call)

    # --- buckets

    def bucket(self, keys: Sequence[Key]) -> BucketedKeys:
        """Put keys that were never pushed into buckets, where they can share a buffer.

        A key goes alone if its value is in memory that all workers share, if it has a communicator of its own, or if an
        optimizer needs all elements of it at one owner.
        """
        session = self._session
        buckets = WorkersBuckets(session, self._queues, self.keys.start_rounds)
        queues = (self._queues.get(session.infos[key].id) for key in keys)
        # Servers have the others, or a part of them.
        infos = [queue.info for queue in queues if queue is not None and not queue.paths.usual.servers]
        if self.keys.direct is not None:
            infos = [info for info in infos if info.space == DEVICE]
        optimizers = [self.keys.owner.optimizer_of(info.id) for info in infos]
        if not infos or self.keys.communicators is not None or session.num_workers == 1:
            return buckets
        if not all(optimizer is None or optimizer.elementwise for optimizer in optimizers):
            return buckets
        self.keys.join(agreed_buckets(session, infos, self._queues))
        return buckets

    # --- states

    def settle_all(self, call: str) -> None:
        self.settle(call)
        if call == SAVE:
            self._session.agree(SAVE, None, SAVE)  # wait until all workers are ready to send their states

    def _owned(self, rank: int) -> list[tuple[KeyInfo, int, int]]:
        """The shard of each key that a worker owns; begin equals end where it owns none."""
        owned = []
        for queue in self.keys.all():
            for info in queue.keys:
                span = queue.span(info)
                begin = min(max(queue.bounds[rank], span.start), span.stop)
                end = max(begin, min(queue.bounds[rank + 1], span.stop))
                owned.append((self._session.infos[info.key], begin - span.start, end - span.start))
        return owned

    def gather_states(self) -> Callable[[], list[list[StateRecord]]]:
        dense = collect(self.keys.owner, self._owned(self._session.rank))
        gathered = self._session.gather(SAVE, records_to_bytes([*dense, *self.rows.states()]))
        return lambda: [records_from_bytes(blob) for blob in gathered]

    def send_states(self, file: StatesFile) -> None:
        """Worker 0 cuts the states; they are sent when all know that the file is good."""
        owned = ([*self._owned(rank), *self.rows.owned(rank)] for rank in range(self._session.num_workers))
        self._blobs = [records_to_bytes(distribute(file, shards)) for shards in owned]

    def take_states(self, replaced: Sequence[KeyInfo]) -> None:
        mine = records_from_bytes(self._session.scatter(LOAD, self._blobs))
        self._blobs = []
        key_ids = [info.id for info in replaced]
        with self._session.engine.lock:
            self.rows.load(mine, key_ids)
            for key_id in key_ids:
                self.keys.owner.states.pop(key_id, None)
            for part in mine:
                if not self._session.infos[part.key].sparse:
                    self.keys.owner.set_state(self._session.infos[part.key], part.state)

    def codec_states(self, call: str) -> list[StateRecord]:
        self.keys.drain(call)
        self._session.agree(call, None, call)  # wait until all workers are ready to send theirs
        return [
            record_of(self._session.infos[info.key], begin, end, state)
            for queue, codec in self.keys.encoded()
            for info in queue.keys
            for begin, end, state in codec.pushed.states_in(queue.span(info))
        ]

    def take_codec_states(self, parts: Sequence[StateRecord]) -> None:
        with self._session.engine.lock:  # `load_states` has waited for all rounds
            for queue, codec in self.keys.encoded():
                begins = {info.key: queue.span(info).start for info in queue.keys}
                mine = [(begins[part.key], part) for part in parts if part.key in begins]
                states = {(at + part.begin, at + part.end): part.state for at, part in mine}
                codec.set_states(states, queue.placement)

    # --- the end

    def leave(self, common: Mapping[int, int]) -> ConfigError | None:
        refused: ConfigError | None = None
        try:
            self.keys.drain("close", common)
        except ConfigError as found:
            refused = found
        self.rows.close()
        return refused

    def free(self) -> None:
        if self.keys.communicators is not None:
            self._session.wait_for(Predicate(self.keys.communicators.all_made), "close")
            self.keys.communicators.free()
        if self.keys.nccl is not None:
            self.keys.nccl.close()
