"""Synchronous without servers: every worker owns a part of each key.

A push puts the gradient into the key's queue. A queue does one round after another: reduce-scatter, so that each worker
holds the sum of the part it owns; the optimizer on that part; allgather of the new values. This is allreduce with the
optimizer in its middle, and the optimizer's state exists once over all workers, not once per worker. A pull waits until
the queue has done this worker's last push and copies the value out.

Cost per round and worker: the two halves of the chosen algorithm; memory: the value, one buffer for each push under
way, 1/W of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from mpikv import buckets, wire
from mpikv.arrays import HostArray
from mpikv.checks import shown
from mpikv.collectives import blobs
from mpikv.collectives.labelled import Comparison
from mpikv.engine.running import Running
from mpikv.errors import ConfigError, UnsupportedError
from mpikv.hostmemory.segment import HostMemory
from mpikv.keys import Key, KeyInfo
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import Owner
from mpikv.optimizers.states import parts_from_bytes, parts_to_bytes
from mpikv.placement import Members, Placement, place
from mpikv.reductions import SUM, Reduction
from mpikv.session.agreement import Disagreement
from mpikv.session.base import Pending
from mpikv.session.contests import Labels
from mpikv.session.workers import KeyEvents, Workers
from mpikv.strategies.arguments import flattened
from mpikv.strategies.base import Entry, PreparedCall, Sink
from mpikv.strategies.blocking import Rounds, in_place_round
from mpikv.strategies.communicators import Communicators
from mpikv.strategies.direct import Direct
from mpikv.strategies.distributed import DistributedStrategy
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.queues import Bucket, Delivery, Reached, Round, RoundQueue, Under
from mpikv.strategies.round_steps import RoundSteps
from mpikv.strategies.states import chosen, collect, distribute, read_file, restored, write_file
from mpikv.strategies.ways import WAYS, Means


class AllreduceStrategy(DistributedStrategy):
    """The strategy of `dist_sync` without servers."""

    def __init__(self, session: Workers, memory: HostMemory | None = None) -> None:
        super().__init__(session)
        self._queues: dict[int, RoundQueue] = {}
        self._space = session.space
        self._owner = Owner(self._space)
        self._first_values: dict[Key, HostArray] = {}  # at worker 0, of keys that are being agreed on
        self._listening: Running[Any] | None = None
        self._communicators = None
        if session.members.path == "native":
            self._communicators = Communicators(session.transport, session.engine)
        self._follow(memory)
        session.start(KeyEvents(self._reserve, self._begin, self._agreed, self._broken, self._pushes))

    # --- the ranks

    def _follow(self, memory: HostMemory | None) -> None:
        """Make all that hangs on who the workers are."""
        session, members = self._session, self._session.members
        if self._listening is not None:
            self._listening.cancel()
        self._hosts = self._listening = self._direct = None
        if memory is not None:
            self._hosts = HostKeys(memory, members.worker_hosts)
            self._listening = session.engine.serve(self._hosts.listen(), "counters of this host")
            if members.path == "direct":
                self._direct = Direct(session, self._hosts, self._queues, self._owner)
        self._placements: dict[tuple[int, Any, bool], Placement] = {}  # of keys that are alike in this
        self._means = Means(session.group, self._space, self._hosts, self._communicators)
        self._rounds = RoundSteps(session.rank, session.num_workers, self._owner, session.control.dispute)

    def regroup(self, members: Members, memory: HostMemory | None = None) -> None:
        """Go on with some of the workers: all keys are placed anew among them, with their values and rounds.

        members: the store's with fewer workers (`Members.only`). memory: new memory, which the ranks of each host that
        stay share; None: they send messages. Prepared calls are made anew, the counts of direct calls start at 0, and
        arrays of `store.empty` are ordinary ones from now on.

        Collective over the workers that stay; blocks until each of them has called it. The others make no further call.
        Every worker that stays must have pushed as often as the others, and those rounds must be complete: StallError
        or PeerError where they are not, MpikvError on all where the counts differ; the store is of no use then.
        UnsupportedError, with nothing changed, where an optimizer is set, since the states of what the others own would
        be lost, and with MPIKV_ALGORITHM=native, whose communicators are those of all workers.
        """
        session = self._session
        if session.optimizers():
            raise UnsupportedError("regroup with an optimizer: states that other workers own would be lost")
        if self._communicators is not None:
            raise UnsupportedError("regroup with MPIKV_ALGORITHM=native")
        members = replace(members, memory=memory is not None)
        self._drain("regroup")
        queues = sorted(self._all_queues(), key=lambda queue: queue.info.id)
        with session.engine.lock:
            if self._direct is not None:
                self._direct.reset()
            session.regroup(members)
            self._follow(memory)
        places = [self._reserve(queue.info) for queue in queues] if session.rank == 0 else None
        places = session.agree("regroup", [sorted(map(list, self._pushes().items())), places], "regroup")
        with session.engine.lock:
            for queue, reserved in zip(queues, places, strict=True):
                value = queue.own
                self._place(queue, reserved)
                self._space.copy(queue.own, value)

    # --- keys as they are agreed on

    def _reserve(self, info: KeyInfo) -> Any:
        """The key's place in shared memory; all else follows from what all workers know."""
        if not self._session.codecs.can_be_added(info):
            raise Disagreement(
                UnsupportedError,
                f"init of key {shown(info.key)}: what {info.codec!r} encodes must be decoded before it is added, "
                "and without servers workers add what travels",
            )
        return None if self._hosts is None else self._hosts.reserve_key(info.n_bytes)

    def _begin(self, info: KeyInfo, reserved: Any) -> None:
        """Open the key's queue, which first brings the value of worker 0 to all."""
        queue = RoundQueue(info, self._space)
        self._place(queue, reserved)
        if self._session.rank == 0:
            self._space.copy(queue.own, self._first_values.pop(info.key))
        self._queues[info.id] = queue
        queue.has_value = queue.way.share_now()
        if not queue.has_value:
            queue.running = self._session.engine.take(Running(self._rounds.run(queue), queue.name))

    def _labels_as_set(self, queue: RoundQueue) -> Labels:
        session = self._session
        return tuple([session.attributes.as_set(session.slot_of(info)) for info in queue.keys])

    def _agreed(self, info: KeyInfo) -> None:
        """Communicators are made in the order of the verdicts."""
        if self._communicators is not None:
            self._communicators.agreed(info)

    def _broken(self, info: KeyInfo) -> None:
        """A key that `init` returned for already turned out to differ between workers: forget it."""
        queue = self._queues.pop(info.id, None)
        if queue is not None and queue.running is not None:
            queue.running.cancel()

    def _pushes(self) -> dict[int, int]:
        """How often this worker has pushed each key."""
        return {info.id: self._pushed(info) for queue in self._all_queues() for info in queue.keys}

    def _pushed(self, info: KeyInfo) -> int:
        return self._queues[info.id].pushes_of(info) + self._queues[info.id].calls.rounds

    def _all_queues(self) -> list[RoundQueue]:
        """Each queue once."""
        return list(dict.fromkeys(self._queues.values()))

    def _place(self, queue: RoundQueue, reserved: Any) -> None:
        """Which way its rounds go, and where its value lives. reserved: its place in the host's memory, or None."""
        # Labels of rounds are compared where there are other workers and something to add.
        queue.comparison = None
        info = queue.info
        if self._session.num_workers > 1 and info.n_elems:
            queue.comparison = Comparison(self._labels_as_set(queue), exact=info.dtype.kind in "iu")
        placement = self._placement(info, room=reserved is not None)
        queue.go(WAYS[placement.path](self._means, info, placement, queue.comparison, reserved))

    def _placement(self, info: KeyInfo, *, room: bool) -> Placement:
        """With the optimizer that serves the key."""
        optimizer = self._owner.optimizer_of(info.id)
        if optimizer is not None and not optimizer.elementwise:
            return place(self._session.members, info, whole=True, room=room)
        alike = info.n_elems, info.dtype, room
        if alike not in self._placements:
            self._placements[alike] = place(self._session.members, info, room=room)
        return self._placements[alike]

    # --- keys

    def init(self, values: Sequence[tuple[Key, tuple[int, ...], HostArray]]) -> None:
        """Agree, then give every worker the value of worker 0."""
        if self._session.rank == 0:
            self._first_values.update({key: value for key, _, value in values})
        agreed, error = self._session.agree_on_keys(values)
        for info in agreed:
            if self._session.is_released(info):
                continue  # it may be forgotten already
            queue = self._queues[info.id]
            if not queue.has_value:
                self._session.wait(Pending(Reached(queue, 0), Waiting("init", info.key, info.id)))
        for key, _, _ in values:
            self._first_values.pop(key, None)
        if error is not None:
            raise error

    # --- push and pull

    def exchange(self, entries: Sequence[Entry], priority: int, op: Reduction = SUM) -> list[Pending]:
        """Put a round into each key's queue; a pull is done as soon as its queue has done this worker's last push."""
        pending = []
        for info, total, sink in entries:
            if total is not None:
                queue = self._queues[info.id]
                with self._session.engine.lock:
                    if self._push(queue, info, Round(self._session.codecs.added(info, total, self._space), op=op)):
                        queue.running = self._session.engine.take(Running(self._rounds.run(queue), queue.name))
            if sink is not None:
                pending.append(self._deliver(info, sink, "pull" if total is None else "pushpull"))
        return pending

    def _push(self, queue: RoundQueue, info: KeyInfo, round_: Round) -> bool:
        """Put a round into its queue; whether the queue is to be started. Under the engine's lock."""
        session, slot = self._session, self._session.slot_of(info)
        number, attributes = session.attributes.number(slot)
        queue.reached(0)
        if attributes is not None:
            self._owner.add_attributes(slot, 0, number, attributes)
        label = session.attributes.label(slot)
        if round_.op is not SUM:
            label = label._replace(op=round_.op.name)
        complete = queue.add(info, round_._replace(under=Under(number, label)))
        if self._direct is not None:
            self._direct.pushed(queue)
        session.control.activity.note(f"push of key {shown(info.key)}")
        return complete and queue.may_start

    def prepare(
        self, infos: Sequence[KeyInfo], values: Sequence[Any], outs: Sequence[Sequence[Any]], op: Reduction
    ) -> PreparedCall | None:
        """The direct way, where all keys go it; else rounds in the caller's arrays.

        None where other arrays than these are to be added.
        """
        if not all(self._session.codecs.plain(info) for info in infos):
            return None
        paths = {self._queues[info.id].way.placement.path for info in infos}
        if self._direct is not None and paths == {"direct"}:
            return self._direct.prepare(infos, values, outs, op)
        flat = flattened(infos, values, outs)
        return None if flat is None else Rounds(self._exchange_in_place, self._session.wait, infos, flat, op)

    def _exchange_in_place(
        self, info: KeyInfo, value: HostArray, outs: tuple[HostArray, ...], op: Reduction
    ) -> Pending:
        queue = self._queues[info.id]
        round_, sink = in_place_round(queue, info, value, outs)
        with self._session.engine.lock:
            if self._push(queue, info, round_._replace(op=op)):
                queue.running = self._session.engine.take(Running(self._rounds.run(queue), queue.name))
        return self._deliver(info, sink, "pushpull")

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        """Memory in a block of the host's, of which a part belongs to this worker."""
        if self._hosts is None:
            return super().allocate(text, n_bytes)
        begin = self._hosts.reserve_arrays(n_bytes) if self._session.rank == 0 else None
        begin = self._session.agree("empty", [text, begin], "empty")
        return None if begin is None else self._hosts.array(begin, n_bytes)

    def stats(self) -> dict[str, int]:
        """Also what went the direct way, and the memory held."""
        held = {"held_bytes": sum(queue.held_bytes for queue in self._all_queues())}
        if self._hosts is not None:
            held["shared_bytes"] = sum(queue.info.n_bytes for queue in self._all_queues() if queue.way.shared)
        if self._direct is not None:
            direct = self._direct.stats()
            held = {**held, **direct, "held_bytes": held["held_bytes"] + direct["held_bytes"]}
        return {**super().stats(), **held}

    def _deliver(self, info: KeyInfo, sink: Sink, call: str) -> Pending:
        queue, waiting = self._queues[info.id], Waiting(call, info.key, info.id, self._pushed(info))
        delivery = Delivery(queue, info, sink)
        with self._session.engine.lock:
            if queue.refused is not None:
                # Raised by the wait: the other keys of this call may not be pushed yet, and other workers push them.
                queue.refuse_pull(delivery)
            elif queue.reached(delivery.round):
                delivery.take(queue.value())
            else:
                queue.deliveries.append(delivery)
        return Pending(delivery, waiting)

    # --- optimizers

    def _drain(self, call: str, common: Mapping[int, int] | None = None) -> None:
        """Wait until all rounds this worker has pushed are done; of the keys in `common` only so many.

        Raises at last where a round was refused, on every worker, so that nothing is left under way.
        """
        refused: ConfigError | None = None
        for queue in self._all_queues():
            rounds = [queue.pushed]
            for info in queue.keys:
                if common is not None and info.id in common:
                    rounds.append(common[info.id] - queue.calls.rounds)
            round_ = min(rounds)
            try:
                self._session.wait(
                    Pending(Reached(queue, round_), Waiting(call, queue.info.key, queue.info.id, round_))
                )
            except ConfigError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        """Each worker keeps a copy for the parts it owns."""
        self._drain("set_optimizer")
        slot, key_ids, pickled = self._session.agree_on_optimizer(optimizer, keys)
        with self._session.engine.lock:
            self._owner.set_optimizer(slot, cloudpickle.loads(pickled), key_ids)
            if self._direct is not None:
                self._direct.reset()
            for queue in self._all_queues():
                queue.way.cut(self._placement(queue.info, room=queue.way.shared))
                if queue.comparison is not None:
                    queue.comparison.restart(self._labels_as_set(queue))

    def _owned(self, rank: int) -> list[tuple[KeyInfo, int, int]]:
        """The part of each key that a worker owns; an empty one where it owns nothing of it."""
        owned = []
        for queue in self._all_queues():
            for info in queue.keys:
                span = queue.span(info)
                begin = min(max(queue.bounds[rank], span.start), span.stop)
                end = max(begin, min(queue.bounds[rank + 1], span.stop))
                owned.append((info, begin - span.start, end - span.start))
        return owned

    # --- buckets

    def bucket(self, keys: Sequence[Key]) -> None:
        """Let keys that were never pushed travel together. keys: in the order in which they will be pushed.

        Collective. Does nothing where a key cannot share a buffer: shared memory, communicators of its own, an
        optimizer that needs the whole of a key.
        """
        infos = [self._session.infos[key] for key in keys]
        optimizers = [self._owner.optimizer_of(info.id) for info in infos]
        if self._direct is not None or self._communicators is not None or self._session.num_workers == 1:
            return
        if not all(optimizer is None or optimizer.elementwise for optimizer in optimizers):
            return
        groups = buckets.plan([info.n_bytes for info in infos], [str(info.dtype) for info in infos])
        self._session.agree("bucket", [[infos[i].id for i in group] for group in groups], "bucket")
        for info in infos:
            self._session.wait(Pending(Reached(self._queues[info.id], 0), Waiting("bucket", info.key, info.id)))
        found = [[infos[i] for i in group if infos[i].n_elems] for group in groups]
        joined = [Bucket(group, self._space) for group in found if len(group) > 1]
        places: Sequence[Any] = [None] * len(joined)
        if self._hosts is not None:
            if self._session.rank == 0:
                places = [self._hosts.reserve_key(bucket.info.n_bytes) for bucket in joined]
            places = self._session.agree("empty", ["buckets", places], "bucket")
        with self._session.engine.lock:
            for bucket, reserved in zip(joined, places, strict=True):
                self._join(bucket, reserved)

    def _join(self, bucket: Bucket, reserved: Any) -> None:
        self._place(bucket, reserved)
        for info in bucket.keys:
            self._space.copy(bucket.own[bucket.span(info)], self._queues[info.id].value())
            self._queues[info.id] = bucket
        bucket.has_value = True

    def skip(self, keys: Sequence[Key], *, changed: bool) -> None:
        """Keys of buckets take no part in this round, on no worker."""
        infos = [self._session.infos[key] for key in keys]
        if changed:
            self._session.agree("skip", list(keys), "a step with other parameters frozen than before")
        with self._session.engine.lock:
            for info in infos:
                queue = self._queues[info.id]
                if isinstance(queue, Bucket) and queue.add(info, None) and queue.may_start:
                    queue.running = self._session.engine.take(Running(self._rounds.run(queue), queue.name))

    def save_states(self, path: str, keys: Sequence[Key] | None = None, *, dump_optimizer: bool) -> None:
        """Gather the states at worker 0, who writes the file."""
        self._drain("save_optimizer_states")
        self._session.agree("save_optimizer_states", None, "save_optimizer_states")  # all are here to send their parts
        mine = parts_to_bytes(collect(self._owner, self._owned(self._session.rank)))
        gathering = self._session.engine.start(blobs.gather(self._session.group, mine, 0, wire.TAG_STATES), "states")
        self._session.wait_for(gathering, "save_optimizer_states")

        def write() -> None:
            parts = [parts_from_bytes(blob) for blob in gathering.result or []]
            write_file(
                path,
                parts,
                chosen(self._session.in_order(), keys),
                self._session.optimizers(),
                dump_optimizer=dump_optimizer,
            )

        self._session.decide("save_optimizer_states", write)

    def load_states(self, path: str) -> None:
        """Worker 0 reads and checks the file, then gives each worker its part."""
        self._drain("load_optimizer_states")
        parts: list[bytes] = []

        def read() -> Any:
            file = read_file(path, self._session.infos, self._session.optimizers())
            for rank in range(self._session.num_workers):
                parts.append(parts_to_bytes(distribute(file, self._owned(rank))))
            return restored(file)

        loaded = self._session.decide("load_optimizer_states", read)
        scattering = self._session.engine.start(
            blobs.scatter(self._session.group, parts if self._session.rank == 0 else None, 0, wire.TAG_STATES), "states"
        )
        self._session.wait_for(scattering, "load_optimizer_states")
        with self._session.engine.lock:
            for key in loaded[0]:
                self._owner.states.pop(self._session.infos[key].id, None)
            for part in parts_from_bytes(scattering.result or b""):
                self._owner.states[self._session.infos[part.key].id] = part.state
        self._session.restore(loaded)

    # --- the end

    def close(self) -> None:
        """Wait until all workers close; what they pushed in common is done first."""
        common, error = self._session.leave(matched=True)
        refused: ConfigError | None = None
        try:
            self._drain("close", common)
        except ConfigError as found:
            refused = found
        if error is not None:
            raise error
        if self._communicators is not None:
            self._communicators.free()
        self._session.end()
        if refused is not None:
            raise refused
