"""The keys that go round the ring of the workers: their queues, their placements and paths.

When the workers have agreed on a key (session/workers), it is placed here: its placement names its path and each
worker's shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpikv.codecs.compression import wire_of
from mpikv.collectives.nccl import NcclComm
from mpikv.engine.running import Running
from mpikv.errors import ConfigError
from mpikv.hostmemory.segment import HostMemory
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import Owner
from mpikv.placement import described
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.place import place
from mpikv.placement.placement import Placement
from mpikv.session.agreed_keys import KeyEvents
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import DEVICE
from mpikv.strategies.direct import Direct
from mpikv.strategies.divided_path import Speaker
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.key_path import PathResources
from mpikv.strategies.message_path import Communicators
from mpikv.strategies.paths import KeyPaths
from mpikv.strategies.queues import RoundQueue, rounds


class PlacedKeys:
    """The keys of one worker.

    queues: by the keys' numbers. owner: applies optimizers to this worker's shards.
    first_values: at worker 0, of keys that are being agreed on. hosts, direct, communicators, nccl: for the paths that
    need them. cuts: of keys on the path "divided", by their numbers: where the elements of servers begin.
    """

    def __init__(
        self,
        session: Workers,
        members: Members,
        memory: HostMemory | None,
        *,
        nccl: NcclComm | None = None,
        speaker: Speaker | None = None,
    ) -> None:
        self.cuts: dict[int, int] = {}
        self._session, self._members = session, members
        self.queues: dict[int, RoundQueue] = {}
        self.owner = Owner(session.spaces)
        self.first_values: dict[Key, SpaceArray] = {}
        self.hosts: HostKeys | None = None
        self.direct: Direct | None = None
        self.communicators: Communicators | None = None
        if members.path == "native":
            self.communicators = Communicators(session.transport, members.workers, session.engine)
        self.nccl = nccl
        agreed = None if self.communicators is None else self._agreed
        self.events = KeyEvents(self._reserve, self._begin, self._forget_key, self._pushes, agreed)
        session.on_attributes.append(lambda slot, number, found: self.owner.add_attributes(slot, 0, number, found))
        if memory is not None:
            self.hosts = HostKeys(memory, members.worker_hosts)
            session.engine.serve(self.hosts.listen(), "counters of this host")
            if members.path == "direct":
                self.direct = Direct(session, self.hosts, self.queues, self.owner)
        self._placements: dict[Any, Placement] = {}  # shared by keys of equal properties
        self._resources = PathResources(
            session.group,
            session.spaces,
            self.hosts,
            self.communicators,
            nccl=self.nccl,
            timeout_s=members.config.timeout_s,
            speaker=speaker,
        )

    # --- keys as they are agreed on

    def _reserve(self, info: KeyInfo) -> Any:
        """Allocate the key's place in shared memory; None: it needs none."""
        on_host = self._members.device_path_of(info) in ("none", "host")
        return self.hosts.reserve_key(info.n_bytes) if on_host and self.hosts is not None else None

    def reserve_divided(self, info: KeyInfo) -> Any:
        """Allocate the place of a key on the path "divided", at worker 0; None: it can have none."""
        first = None if self.hosts is None else self.hosts.reserve_key(info.n_bytes)
        second = None if self.hosts is None or first is None else self.hosts.reserve_key(0)
        return None if first is None or second is None else [*first, second.counters_bytes]

    def _begin(self, info: KeyInfo, reserved: Any) -> None:
        """Make the key's queue, and start to broadcast the value of worker 0."""
        queue = RoundQueue(info, self._session.spaces.of(info))
        self._place(queue, reserved)
        if self._session.rank == 0:
            value = self.first_values[info.key][: queue.stored.size]  # in front of a cut
            # Shared memory is zero at first, and has no pages until it is written: zeros need not be copied there.
            if info.space == DEVICE or value.view(np.uint8).any() or not queue.paths.value_is_shared:
                queue.space.copy(queue.stored, value)
        self.queues[info.id] = queue
        queue.has_value = queue.paths.broadcast_now()
        if not queue.has_value:
            queue.running = self._session.engine.take(Running(rounds(queue, self._session, self.owner), queue.name))

    def _forget_key(self, info: KeyInfo) -> None:
        queue = self.queues.pop(info.id, None)
        if queue is not None and queue.running is not None:
            queue.running.cancel()
            queue.space.synchronize()

    def _agreed(self, info: KeyInfo) -> None:
        if self.communicators is not None:
            self.communicators.agreed(info)

    def _place(self, queue: RoundQueue, reserved: Any) -> None:
        """Give a queue its paths and the memory of its value. reserved: its place in shared memory, or None."""
        placement = self._placement(queue.info, has_place=reserved is not None)
        queue.use_paths(KeyPaths(self._resources, queue.info, placement, reserved))
        if self._session.log.detailed():
            self._session.log.detail(lambda: self._described(queue))

    def _described(self, queue: RoundQueue) -> str:
        return described.line(self._members, queue.info, queue.placement, wire_of(queue.info))

    def _placement(self, info: KeyInfo, *, has_place: bool) -> Placement:
        """The placement of a key with its optimizer. has_place: whether it has a place in shared memory."""
        optimizer, end = self.owner.optimizer_of(info.id), self.cuts.get(info.id)
        updated, whole = optimizer is not None, optimizer is not None and not optimizer.elementwise
        properties = info.n_elems, info.dtype, info.space, has_place, updated, end
        if whole or properties not in self._placements:
            placement = place(self._members, info, whole=whole, fits=has_place, updated=updated, end=end)
            if whole:
                return placement  # not shared: its owner depends on the key
            self._placements[properties] = placement
        return self._placements[properties]

    # --- rounds

    def new_running(self, queue: RoundQueue) -> Running[None] | None:
        """Make what does the queue's rounds, for the engine to run; None: it runs already."""
        return Running(rounds(queue, self._session, self.owner), queue.name) if queue.may_start else None

    def all(self) -> list[RoundQueue]:
        return list(self.queues.values())

    def pushed(self, info: KeyInfo) -> int:
        queue = self.queues[info.id]
        return queue.pushed + queue.direct_calls.rounds

    def _pushes(self) -> dict[int, int]:
        return {queue.info.id: self.pushed(queue.info) for queue in self.all()}

    def drain(self, call: str, common: Mapping[int, int] | None = None) -> None:
        """Wait until all rounds that this worker has pushed are done; of keys in `common` only that number of rounds.

        Raises ConfigError where a round was refused, on every worker, after all others are done.
        """
        refused: ConfigError | None = None
        for queue in self.all():
            round_ = queue.pushed
            if common is not None and queue.info.id in common:
                round_ = min(round_, common[queue.info.id] - queue.direct_calls.rounds)
            try:
                self._session.wait(Pending(queue.at(round_), Waiting(call, queue.info.key, queue.info.id, round_)))
            except ConfigError as error:
                if call != "close" or not self._session.given.has(error, [queue.info.id]):
                    refused = refused or error
        if refused is not None:
            raise refused

    # --- what changes owners

    def set_optimizer(self, slot: int, optimizer: Optimizer | dict[str, Any], key_ids: list[int]) -> None:
        """Set an optimizer, or its attributes, as in `Owner`. Not to be called while rounds are in progress.

        All workers have agreed on it, and each has its own copy.
        """
        with self._session.engine.lock:
            self.owner.set_optimizer(slot, optimizer, key_ids)
            if self.direct is not None:
                self.direct.reset()
            for queue in self.all():
                queue.paths.reshard(self._placement(queue.info, has_place=queue.paths.shared))
                queue.comparison = None
