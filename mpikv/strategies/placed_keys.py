"""The keys of one worker among workers that own them: their queues, the paths they go, and who the workers are.

Workers agree on keys (session/workers); each key then begins here, and its placement says which path it goes and what
each worker owns of it. All of it follows from who the workers are, and is made anew when they become fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from mpikv.codecs.choice import Choices
from mpikv.codecs.compression import wire_of
from mpikv.codecs.identity import IDENTITY
from mpikv.collectives.nccl import NcclComm
from mpikv.engine.running import Running
from mpikv.errors import ConfigError, UnsupportedError
from mpikv.hostmemory.segment import HostMemory
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import Owner
from mpikv.optimizers.states import StateRecord, record_of
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import Comparison, Under
from mpikv.placement.members import Members
from mpikv.placement.place import place
from mpikv.placement.placement import Placement
from mpikv.session.agreed_keys import KeyEvents
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import DEVICE, HOST
from mpikv.strategies.bucketed import Bucket
from mpikv.strategies.communicators import Communicators
from mpikv.strategies.direct import Direct
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.key_codec import KeyCodec
from mpikv.strategies.key_path import Means
from mpikv.strategies.paths import KeyPaths
from mpikv.strategies.pieces import encoded_bytes
from mpikv.strategies.queues import RoundQueue, RoundReached
from mpikv.strategies.round_steps import RoundSteps
from mpikv.strategies.sparse_owners import WorkersRows


class PlacedKeys:
    """Those of one worker.

    queues: by the keys' numbers; keys of a bucket have the same. owner: of the parts that this worker owns. rows: the
    row-sparse keys. first_values: at worker 0, of keys that are being agreed on. hosts, direct, communicators, nccl: of
    the paths that need them; None where the store has no such path.
    """

    def __init__(
        self, session: Workers, memory: HostMemory | None, rows: WorkersRows, nccl: NcclComm | None = None
    ) -> None:
        self._session, self._rows = session, rows
        self.queues: dict[int, RoundQueue] = {}
        self.owner = Owner(session.spaces)
        self.first_values: dict[Key, SpaceArray] = {}
        self._listening: Running[Any] | None = None
        self.hosts: HostKeys | None = None
        self.communicators: Communicators | None = None
        if session.members.path == "native":
            self.communicators = Communicators(session.transport, session.engine)
        self.nccl = nccl
        self._follow(memory)
        agreed = None if self.communicators is None else self._agreed
        session.start(KeyEvents(self._reserve, self._begin, self._broken, self._pushes, agreed))

    # --- the ranks

    def _follow(self, memory: HostMemory | None) -> None:
        """Make all that hangs on who the workers are."""
        session, members = self._session, self._session.members
        if self._listening is not None:
            self._listening.cancel()
        if self.hosts is not None:
            self.hosts.close()
        self.hosts = self._listening = self.direct = None
        if memory is not None:
            space = cast(DeviceSpace, session.spaces.device) if members.device_path == "ipc" else None
            self.hosts = HostKeys(memory, members.worker_hosts, space)
            self._listening = session.engine.serve(self.hosts.listen(), "counters of this host")
            if members.path == "direct":
                self.direct = Direct(session, self.hosts, self.queues, self.owner)
        self._placements: dict[Any, Placement] = {}  # of keys that are alike
        self._means = Means(
            session.key_group,
            session.spaces,
            self.hosts,
            self.communicators,
            nccl=self.nccl,
            timeout_s=members.config.timeout_s,
            plain_group=session.group,
            choices=Choices(),
        )
        self._rounds = RoundSteps(
            session.num_workers,
            self.owner,
            self._comparison,
            session.different,
            priorities=session.priorities,
        )

    def regroup(self, members: Members, memory: HostMemory | None = None) -> None:
        """Go on with some of the workers: all keys are placed anew among them, with their values and rounds.

        members: the store's with fewer workers (`Members.only`). memory: new memory, which the ranks of each host that
        stay share; None: they send messages. Prepared calls are made anew, the counts of direct calls start at 0, and
        arrays of `store.empty` are ordinary ones from now on.

        Collective over the workers that stay; blocks until each of them has called it. The others make no further call.
        Every worker that stays must have pushed as often as the others, and those rounds must be complete: StallError
        or PeerError where they are not, MpikvError on all where the counts differ; the store is of no use then.
        UnsupportedError, with nothing changed, where an optimizer is set, since the states of what the others own would
        be lost, and with MPIKV_ALGORITHM=native, whose communicators are those of all workers. Keys that went by NCCL
        go the path `staged` from now on.
        """
        session = self._session
        if session.optimizers():
            raise UnsupportedError("regroup with an optimizer: states that other workers own would be lost")
        if self.communicators is not None:
            raise UnsupportedError("regroup with MPIKV_ALGORITHM=native")
        if self._rows.any:
            raise UnsupportedError("regroup with row-sparse keys: rows that other workers own would be lost")
        members = replace(members, memory=memory is not None)
        if members.device_path == "nccl":
            reasons = (*members.device_reasons, ("nccl", "its communicator was that of more workers"))
            members = replace(members, device_path="staged", device_reasons=reasons)
        if members.device_path == "ipc" and memory is None:
            members = replace(members, device_path="staged", device_reasons=(("ipc", "regroup without memory"),))
        self.drain("regroup")
        queues = sorted(self.all(), key=lambda queue: queue.info.id)
        self._settle(queues)
        if self.nccl is not None:
            self.nccl.close(alone=True)
            self.nccl = None
        with session.engine.lock:
            if self.direct is not None:
                self.direct.reset()
            session.regroup(members)
            self._follow(memory)
        places = [self._reserve(queue.info) for queue in queues] if session.rank == 0 else None
        places = session.agree("regroup", [sorted(map(list, self._pushes().items())), places], "regroup")
        with session.engine.lock:
            for queue, reserved in zip(queues, places, strict=True):
                value, before = queue.own, queue.paths.codec
                self._place(queue, reserved)
                queue.space.copy(queue.own, value)
                if queue.paths.codec is not None and before is not None:
                    queue.paths.codec.remember(before.pushed.states, queue.placement)

    # --- keys as they are agreed on

    def _reserve(self, info: KeyInfo, keys: Sequence[KeyInfo] = ()) -> Any:
        """The key's place in shared memory; all else follows from what all workers know. keys: of a bucket."""
        if info.sparse:
            return None
        if self.hosts is None:
            return None
        on_device = info.space == DEVICE
        path = self._session.members.device_path_of(info) if on_device else "host"
        may_be_encoded = info.codec != IDENTITY.name or info.dtype.itemsize == 2  # half precision
        if may_be_encoded:
            placement = self._placement(info, keys or (info,), room=True)
            if _is_encoded(placement) and not _goes_hosted(placement):
                return None
        if on_device and path not in {"ipc", "staged"}:
            return None
        return self.hosts.reserve_key(0 if on_device and path == "ipc" else info.n_bytes, pages=on_device)

    def _begin(self, info: KeyInfo, reserved: Any) -> None:
        """Open the key's queue, which first brings the value of worker 0 to all. Of a row-sparse key the rows go to
        their owners.
        """
        if info.sparse:
            self._rows.begin(info)
            return
        queue = RoundQueue(info, self._session.spaces.of(info))
        self._place(queue, reserved)
        if self._session.rank == 0:
            value = self.first_values.pop(info.key)
            # Memory of the host that its ranks share begins as zeros, and takes no pages before it is written to.
            if info.space == DEVICE or value.view(np.uint8).any() or not queue.paths.home_is_shared:
                queue.space.copy(queue.own, value)
        self.queues[info.id] = queue
        queue.has_value = queue.paths.share_now()
        if not queue.has_value:
            queue.running = self._session.engine.take(Running(self._rounds.run(queue), queue.name))

    def _broken(self, info: KeyInfo) -> None:
        """A key that `init` returned for already turned out to differ between workers: forget it."""
        self._rows.client.forget(info)
        queue = self.queues.pop(info.id, None)
        if queue is not None and queue.running is not None:
            queue.running.cancel()
            queue.space.synchronize()

    def _agreed(self, info: KeyInfo) -> None:
        if self.communicators is not None and not info.sparse:
            self.communicators.agreed(info)

    def _settle(self, queues: Sequence[RoundQueue]) -> None:
        """Wait for copies that are under way in memory of paths that other paths take the place of."""
        for space in {id(queue.space): queue.space for queue in queues}.values():
            space.synchronize()

    def _place(self, queue: RoundQueue, reserved: Any) -> None:
        """Which paths its rounds go, and where its value lives. reserved: its place in the host's memory, or None."""
        placement = self._placement(queue.info, queue.keys, room=reserved is not None)
        queue.go(KeyPaths(self._means, queue.info, placement, reserved))

    def _placement(
        self, info: KeyInfo, keys: Sequence[KeyInfo], *, room: bool, encoded: bool | None = None
    ) -> Placement:
        """With the optimizers that serve the keys of a queue."""
        optimizers = [optimizer for key in keys if (optimizer := self.owner.optimizer_of(key.id)) is not None]
        whole = bool(optimizers) and not all(optimizer.elementwise for optimizer in optimizers)
        alike = info.n_elems, info.dtype, info.codec, info.space, room, bool(optimizers), encoded
        if whole or alike not in self._placements:
            placement = place(
                self._session.members,
                info,
                whole=whole,
                room=room,
                wire=wire_of(info),
                updated=bool(optimizers),
                encoded=encoded,
            )
            if whole:
                return placement  # whose owner depends on the key
            self._placements[alike] = placement
        return self._placements[alike]

    def _comparison(self, queue: RoundQueue) -> Comparison | None:
        """Of the labels of its rounds, where there are other workers and something to add."""
        session = self._session
        if session.num_workers == 1 or not queue.info.n_elems:
            return None
        return Comparison(tuple(session.attributes.as_set(session.slot_of(info)) for info in queue.keys))

    # --- rounds

    def start(self, queue: RoundQueue) -> None:
        """Let its rounds be done, unless they are. Under the engine's lock."""
        running = self.due(queue)
        if running is not None:
            queue.running = self._session.engine.take(running)

    def due(self, queue: RoundQueue) -> Running[None] | None:
        """What does its rounds, to be taken by the engine; None: they are being done."""
        return Running(self._rounds.run(queue), queue.name) if queue.may_start else None

    def under(self, info: KeyInfo) -> Under:
        """What a push of this key is made under now; the owner of what this worker owns knows it."""
        under, attributes = self._session.under(info)
        if attributes is not None:
            self.owner.add_attributes(self._session.slot_of(info), 0, under.number, attributes)
        return under

    def all(self) -> list[RoundQueue]:
        """Each queue once."""
        return list(dict.fromkeys(self.queues.values()))

    def pushed(self, info: KeyInfo) -> int:
        """How often this worker has pushed a key."""
        queue = self.queues[info.id]
        return queue.pushes_of(info) + queue.calls.rounds

    def _pushes(self) -> dict[int, int]:
        """The same of each key, by its number."""
        dense = {info.id: self.pushed(info) for queue in self.all() for info in queue.keys}
        return {**dense, **self._rows.client.pushes()}

    def drain(self, call: str, common: Mapping[int, int] | None = None) -> None:
        """Wait until all rounds this worker has pushed are done; of the keys in `common` only so many.

        Raises at last where a round was refused, on every worker, so that nothing is left under way.
        """
        refused: ConfigError | None = None
        for queue in self.all():
            rounds = [queue.pushed]
            for info in queue.keys:
                if common is not None and info.id in common:
                    rounds.append(common[info.id] - queue.calls.rounds)
            round_ = min(rounds)
            try:
                self._session.wait(
                    Pending(RoundReached(queue, round_), Waiting(call, queue.info.key, queue.info.id, round_))
                )
            except ConfigError as error:
                if call != "close" or not self._session.given.has(error, [info.id for info in queue.keys]):
                    refused = refused or error
        if refused is not None:
            raise refused

    @property
    def shared_bytes(self) -> int:
        """Of values in host memory that the ranks of this host share."""
        return sum(queue.info.n_bytes for queue in self.all() if queue.info.space == HOST and queue.paths.shared)

    # --- codecs

    def _encoded(self) -> list[tuple[RoundQueue, KeyCodec]]:
        """The queues whose values travel encoded."""
        return [(queue, codec) for queue in self.all() if (codec := queue.paths.codec) is not None]

    def encoded_bytes(self) -> dict[str, int]:
        """What was encoded of pushes, before and after; nothing where no key is compressed."""
        return encoded_bytes(codec.pushed for _, codec in self._encoded())

    def compressed_keys(self) -> dict[str, Any]:
        """Of each key that may travel encoded or as it is, how it does now, and how long a round of all keys took that
        are timed with it.
        """
        return {
            str(info.key): choice.stats(info.codec)
            for queue, codec in self._encoded()
            if (choice := codec.choice) is not None
            for info in queue.keys
        }

    def codec_states(self) -> list[StateRecord]:
        """What is remembered of this worker's pushes. Not while rounds are under way."""
        return [
            record_of(info, begin, end, state)
            for queue, codec in self._encoded()
            for info in queue.keys
            for begin, end, state in codec.pushed.states_in(queue.span(info))
        ]

    def take_codec_states(self, parts: Sequence[StateRecord]) -> None:
        """Remember this instead. Not while rounds are under way."""
        with self._session.engine.lock:
            for queue, codec in self._encoded():
                begins = {info.key: queue.span(info).start for info in queue.keys}
                mine = [(begins[part.key], part) for part in parts if part.key in begins]
                states = {(at + part.begin, at + part.end): part.state for at, part in mine}
                codec.remember(states, queue.placement)

    # --- what changes owners

    def set_optimizer(self, slot: int, optimizer: Optimizer | dict[str, Any], key_ids: list[int]) -> None:
        """What all workers agreed on, this worker's own copy, as for `Owner`. Not while rounds are under way."""
        with self._session.engine.lock:
            self.owner.set_optimizer(slot, optimizer, key_ids)
            if self.direct is not None:
                self.direct.reset()
            for queue in self.all():
                encoded, room = _is_encoded(queue.placement), queue.paths.shared
                queue.paths.cut(self._placement(queue.info, queue.keys, room=room, encoded=encoded))
                queue.comparison = None

    def join(self, buckets: Sequence[Bucket]) -> None:
        """Let the keys of buckets, which were never pushed, go in these from now on. Collective, blocks."""
        session = self._session
        places: Sequence[Any] = [None] * len(buckets)
        if self.hosts is not None:
            if session.rank == 0:
                places = [self._reserve(bucket.info, bucket.keys) for bucket in buckets]
            places = session.agree("empty", ["buckets", places], "bucket")
        self._settle(buckets)
        with session.engine.lock:
            for bucket, reserved in zip(buckets, places, strict=True):
                self._place(bucket, reserved)
                for info in bucket.keys:
                    bucket.space.copy(bucket.own[bucket.span(info)], self.queues[info.id].value())
                    self.queues[info.id] = bucket
                bucket.has_value = True

    def owned(self, rank: int) -> list[tuple[KeyInfo, int, int]]:
        """The part of each key that a worker owns; an empty one where it owns nothing of it."""
        owned = []
        for queue in self.all():
            for info in queue.keys:
                span = queue.span(info)
                begin = min(max(queue.bounds[rank], span.start), span.stop)
                end = max(begin, min(queue.bounds[rank + 1], span.stop))
                owned.append((info, begin - span.start, end - span.start))
        return owned


def _is_encoded(placement: Placement) -> bool:
    return "encoded" in (placement.path, placement.host)


def _goes_hosted(placement: Placement) -> bool:
    """Whether values of an encoded key go through the memory of hosts in rounds in which they travel as they are."""
    return placement.plain is not None and "hosted" in (placement.plain[0], placement.host)
