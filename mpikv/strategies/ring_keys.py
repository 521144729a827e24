"""The keys that go round the ring of the workers, or through the memory of their host.

When the workers have agreed on a key (session/workers), it gets a queue here, and a placement, which names its path and
each worker's shard. A queue does one round after another. A round is a reduce-scatter, after which each worker has the
sum of the shard it owns; the optimizer on that shard; and an allgather of the new values. This is an allreduce with the
optimizer in the middle, whose state exists once over all workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.codecs.compression import wire_of
from mpikv.collectives.nccl import NcclComm
from mpikv.engine.operation import Predicate
from mpikv.engine.running import Running
from mpikv.errors import ConfigError
from mpikv.hostmemory.segment import HostMemory
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import Owner
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import StatesFile, records_from_bytes, records_to_bytes
from mpikv.placement import described
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.members import Members, Path
from mpikv.placement.place import place
from mpikv.placement.placement import Placement
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.spaces.named import DEVICE
from mpikv.strategies.base import Entry, PreparedCall
from mpikv.strategies.copied_path import CopiedPath
from mpikv.strategies.direct import Direct
from mpikv.strategies.divided_path import DividedPath, Speaker
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.hosted_path import HostedPath, OneHostPath
from mpikv.strategies.key_path import KeyPath, PathResources
from mpikv.strategies.message_path import Communicators, MpiPath, NativePath, RingPath
from mpikv.strategies.nccl_path import NcclPath
from mpikv.strategies.queued_call import QueuedCall
from mpikv.strategies.queues import RoundQueue, rounds
from mpikv.strategies.states import LOAD, collect, distribute

PATHS: Mapping[Path, type[KeyPath]] = {
    "direct": OneHostPath,
    "hosted": HostedPath,
    "divided": DividedPath,
    "ring": RingPath,
    "native": NativePath,
    "mpi": MpiPath,
    "nccl": NcclPath,
}


class RingKeys:
    """Those of one worker. members: the workers alone; with owners beside them in a store that has no such keys.

    queues: by the keys' numbers. owner: applies optimizers to this worker's shards.
    first_values: at worker 0, of keys that are being agreed on. hosts, direct, communicators, nccl: for the paths
    that need them. cuts: of keys on the path "divided", by their numbers: where the elements of servers begin. speaker:
    asks servers for these.
    """

    def __init__(
        self,
        session: Workers,
        members: Members,
        memory: HostMemory | None,
        *,
        nccl: NcclComm | None = None,
        speaker: Speaker,
    ) -> None:
        self.in_use = members.path != "owners"
        self.cuts: dict[int, int] = {}
        self._session, self._members = session, members
        self.queues: dict[int, RoundQueue] = {}
        self.owner = Owner(session.spaces)
        self.first_values: dict[Key, Any] = {}
        self.hosts: HostKeys | None = None
        self.direct: Direct | None = None
        self.communicators: Communicators | None = None
        if members.path == "native":
            self.communicators = Communicators(session.transport, members.workers, session.engine)
        self.nccl = nccl
        if self.in_use:
            session.on_attributes.append(lambda slot, number, found: self.owner.add_attributes(slot, 0, number, found))
        if memory is not None:
            self.hosts = HostKeys(memory, members.worker_hosts)
            session.engine.serve(self.hosts.listen(), "counters of this host")
            if members.path == "direct":
                self.direct = Direct(session, self.hosts, self.queues, self.owner)
        self._placements: dict[Any, Placement] = {}  # shared by keys of equal properties
        self._blobs: list[bytes] = []  # at worker 0, the states that each worker gets of a file
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

    def reserve_place(self, info: KeyInfo) -> Any:
        """Allocate the key's place in shared memory; None: it needs none."""
        on_host = self._members.device_path_of(info) in ("none", "host")
        return self.hosts.reserve_key(info.n_bytes) if on_host and self.hosts is not None else None

    def reserve_divided(self, info: KeyInfo) -> Any:
        """Allocate the place of a key on the path "divided", at worker 0; None: it can have none."""
        if self.hosts is None or (first := self.hosts.reserve_key(info.n_bytes)) is None:
            return None
        second = self.hosts.reserve_key(0)
        return None if second is None else [*first, second.counters_bytes]

    def begin(self, info: KeyInfo, reserved: Any) -> None:
        """Make the key's queue, and start to broadcast the value of worker 0. reserved: its place in shared memory."""
        placement = self._placement(info, has_place=reserved is not None)
        given = self._resources, info, placement, reserved
        host = placement.host
        path = PATHS[placement.path](*given) if host is None else CopiedPath(*given, PATHS[host])
        queue = RoundQueue(info, self._session.spaces.of(info), path)
        if self._session.log.detailed():
            self._session.log.detail(lambda: described.line(self._members, info, placement, wire_of(info)))
        if self._session.rank == 0:
            value = self.first_values[info.key]
            # Shared memory is zero at first, and has no pages until it is written: zeros need not be copied there.
            if info.space == DEVICE or value.view(np.uint8).any() or not queue.path.shared:
                queue.space.copy(queue.stored, value)
        self.queues[info.id] = queue
        queue.has_value = queue.path.broadcast_now()
        if not queue.has_value:
            queue.running = self._session.engine.take(Running(rounds(queue, self._session, self.owner), queue.name))

    def forget(self, info: KeyInfo) -> None:
        queue = self.queues.pop(info.id, None)
        if queue is not None and queue.running is not None:
            queue.running.cancel()
            queue.space.synchronize()

    def agreed(self, info: KeyInfo) -> None:
        if self.communicators is not None and info.id in self.queues:
            self.communicators.agreed(info)

    def wait_for_values(self, agreed: Sequence[KeyInfo]) -> None:
        """Wait until the keys that were agreed on can be pushed and pulled. Blocks."""
        for info in agreed:
            queue = self.queues.get(info.id)
            if queue is None or self._session.is_released(info):
                continue  # it has other owners; a released key may be gone already
            if not queue.has_value:
                self._session.wait(Pending(queue.at(0), Waiting("init", info.key, info.id)))

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

    # --- calls and rounds

    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        """Take the direct path if it is that of all keys and the caller lends its arrays; else the keys' queues."""
        queued = QueuedCall(self, self._session, entries, op)
        if op.whole or not waits or self.direct is None or any(entry.outs is None for entry in entries):
            return queued
        if {self.queues[entry.info.id].placement.path for entry in entries} != {"direct"}:
            return queued
        return self.direct.prepare(entries, op, queued) or queued

    def new_running(self, queue: RoundQueue) -> Running[None] | None:
        """Make what does the queue's rounds, for the engine to run; None: it runs already."""
        return Running(rounds(queue, self._session, self.owner), queue.name) if queue.may_start else None

    def all(self) -> list[RoundQueue]:
        return list(self.queues.values())

    def pushed(self, info: KeyInfo) -> int:
        queue = self.queues[info.id]
        return queue.pushed + queue.direct_calls.rounds

    def pushes(self) -> dict[int, int]:
        return {queue.info.id: self.pushed(queue.info) for queue in self.all()}

    def drain(self, call: str, common: Mapping[int, int] | None = None) -> ConfigError | None:
        """Wait until all rounds that this worker has pushed are done; of keys in `common` only that number of rounds.

        Returns the error of a round that was refused, on every worker, when all others are done.
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
        return refused

    # --- optimizers and states

    def set_optimizer(self, slot: int, optimizer: Optimizer | dict[str, Any], key_ids: list[int]) -> None:
        """Set an optimizer, or its attributes, as in `Owner`. Not to be called while rounds are in progress.

        All workers have agreed on it, and each has its own copy.
        """
        with self._session.engine.lock:
            self.owner.set_optimizer(slot, optimizer, key_ids)
            if self.direct is not None:
                self.direct.reset()
            for queue in self.all():
                queue.path.reshard(self._placement(queue.info, has_place=queue.path.place is not None))
                queue.comparison = None

    def _owned(self, rank: int) -> list[tuple[KeyInfo, int, int]]:
        """The shard of each key that a worker owns; begin equals end where it owns none."""
        return [(queue.info, queue.bounds[rank], queue.bounds[rank + 1]) for queue in self.all()]

    def own_states(self) -> list[StateRecord]:
        """The states of this worker's shards. Local."""
        return collect(self.owner, self._owned(self._session.rank)) if self.in_use else []

    def send_states(self, file: StatesFile) -> None:
        """Cut the states of a file, at worker 0; they are sent when all know that the file is good."""
        owned = (self._owned(rank) for rank in range(self._session.num_workers))
        self._blobs = [records_to_bytes(distribute(file, shards)) for shards in owned]

    def take_states(self, replaced: Sequence[KeyInfo]) -> None:
        """Use what `send_states` has given. replaced: the keys that lose the states that they have. Collective."""
        if not self.in_use:
            return
        mine = records_from_bytes(self._session.scatter(LOAD, self._blobs))
        self._blobs = []
        with self._session.engine.lock:
            for info in replaced:
                self.owner.states.pop(info.id, None)
            for part in mine:
                self.owner.set_state(self._session.infos[part.key], part.state)

    # --- memory, and the end

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        """See `Strategy.allocate`."""
        found = self.reserve(n_bytes)
        begin = self._session.agree("empty", [text, None if found is None else found[1]], "empty")
        return None if self.hosts is None or begin is None else self.hosts.array(begin, n_bytes)

    def reserve(self, n_bytes: int) -> tuple[HostMemory, int | None] | None:
        """See `Strategy.reserve`."""
        if self.hosts is None:
            return None
        return self.hosts.memory, self.hosts.reserve_arrays(n_bytes) if self._session.rank == 0 else None

    def stats(self) -> dict[str, Any]:
        if not self.in_use:
            return {}
        held: dict[str, Any] = {"held_bytes": sum(queue.held_bytes for queue in self.all())}
        if self.hosts is not None:
            shared = (queue for queue in self.all() if queue.path.shared)
            held["shared_bytes"] = sum(queue.info.n_bytes for queue in shared)
        if self.direct is not None:
            direct = self.direct.stats()
            held = {**held, **direct, "held_bytes": held["held_bytes"] + direct["held_bytes"]}
        return held

    def free(self) -> None:
        """Free what only workers that are all still there can free."""
        if self.communicators is not None:
            self._session.wait_for(Predicate(self.communicators.all_made), "close")
            self.communicators.free()
        if self.nccl is not None:
            self.nccl.close()
