"""Synchronous without servers: every worker owns a part of each key.

A push puts the gradient into the key's queue. A queue does one round after another: reduce-scatter, so that each worker
holds the sum of the part it owns; the optimizer on that part; allgather of the new values. This is allreduce with the
optimizer in its middle, and the optimizer's state exists once over all workers, not once per worker. A pull waits until
the queue has done this worker's last push and copies the value out.

Cost per round and worker: the two halves of the chosen algorithm; memory: the value, one buffer for each push under
way, 1/W of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.arrays.row_ids import Ids
from mpikv.arrays.row_sparse import RowSparse
from mpikv.collectives.nccl import NcclComm
from mpikv.engine.operation import Predicate
from mpikv.errors import ConfigError
from mpikv.hostmemory.segment import HostMemory
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import records_from_bytes, records_to_bytes
from mpikv.placement.keys import Key, KeyInfo
from mpikv.session.base import NewKey, Pending
from mpikv.session.workers import Workers
from mpikv.spaces.named import DEVICE
from mpikv.strategies.base import Entry, Loaded, PreparedCall, Read, Strategy, Travelling, Write
from mpikv.strategies.bucketed import Bucketed, agreed_buckets
from mpikv.strategies.placed_keys import PlacedKeys
from mpikv.strategies.queued_call import QueuedCall
from mpikv.strategies.queues import RoundReached
from mpikv.strategies.sparse_owners import RowServer, WorkersRows
from mpikv.strategies.states import LOAD, SAVE, collect, distribute, restored


class AllreduceStrategy(Strategy):
    """The strategy of `dist_sync` without servers. keys: of this worker; they can go on with fewer workers."""

    def __init__(
        self,
        session: Workers,
        serve_rows: Callable[[], RowServer],
        memory: HostMemory | None = None,
        nccl: NcclComm | None = None,
    ) -> None:
        """serve_rows: makes what serves this worker's rows of row-sparse keys."""
        self._session = session
        self._rows = WorkersRows(session, serve_rows)
        self.keys = PlacedKeys(session, memory, self._rows, nccl)
        self._queues = self.keys.queues

    # --- keys

    def init(self, values: Sequence[NewKey]) -> None:
        """Agree, then give every worker the value of worker 0."""
        if self._session.rank == 0:
            dense = {new.key: new.value for new in values if not isinstance(new.value, RowSparse)}
            self.keys.first_values.update(dense)
        self._rows.propose(values)
        agreed, error = self._session.agree_on_keys(values)
        for info in agreed:
            if info.sparse or self._session.is_released(info):
                continue  # its rows are asked for when they are needed; it may be forgotten already
            queue = self._queues[info.id]
            if not queue.has_value:
                self._session.wait(Pending(RoundReached(queue, 0), Waiting("init", info.key, info.id)))
        for new in values:
            self.keys.first_values.pop(new.key, None)
        self._rows.client.proposed(values)
        if error is not None:
            raise error

    # --- push and pull

    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        """Through the keys' queues, or on the direct path where all keys go it and the arrays are the caller's own."""
        queued = QueuedCall(self.keys, self._session, entries, op)
        if not waits or (direct := self.keys.direct) is None or any(entry.outs is None for entry in entries):
            return queued
        if {self._queues[entry.info.id].placement.path for entry in entries} != {"direct"}:
            return queued
        return direct.prepare(entries, op, queued) or queued

    def push_rows(self, info: KeyInfo, total: RowSparse, priority: int) -> None:
        """One message to each worker that owns rows of the key."""
        with self._session.engine.lock:
            self._rows.push(info, total, self.keys.under(info), priority)

    def pull_rows(self, info: KeyInfo, ids: Ids, priority: int, call: str) -> tuple[HostArray, list[Pending]]:
        """One message to each worker that owns some of the rows, and its answer."""
        return self._rows.client.pull(info, ids, priority, call)

    def changed_rows(self, info: KeyInfo, priority: int) -> tuple[list[Pending], Callable[[], RowSparse]]:
        """One message to each owner, and its answer."""
        return self._rows.client.changed(info, priority)

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        """Memory in a block of the host's, of which a part belongs to this worker."""
        hosts, found = self.keys.hosts, self._reserve("empty", text, n_bytes)
        return None if hosts is None or found is None else hosts.array(found[1], n_bytes)

    def reserve(self, call: str, n_bytes: int) -> tuple[HostMemory, int] | None:
        """A block of the host's memory."""
        return self._reserve(call, "a collective call", n_bytes)

    def _reserve(self, call: str, text: str, n_bytes: int) -> tuple[HostMemory, int] | None:
        hosts = self.keys.hosts
        begin = hosts.reserve_arrays(n_bytes) if hosts is not None and self._session.rank == 0 else None
        begin = self._session.agree("empty", [text, begin], call)
        return None if hosts is None or begin is None else (hosts.memory, begin)

    def stats(self) -> dict[str, Any]:
        """What went the direct path, the memory held, and what was encoded.

        encoded_from_bytes, encoded_bytes: pushes before and after; missing where no key is compressed. compressed_keys:
        how each key travels that may travel encoded or as it is; missing where there is none.
        """
        held: dict[str, Any] = {"held_bytes": sum(queue.held_bytes for queue in self.keys.all())}
        if self._rows.any:
            held["row_bytes"] = self._rows.held_bytes
        if self.keys.hosts is not None:
            held["shared_bytes"] = self.keys.shared_bytes
        if self.keys.direct is not None:
            direct = self.keys.direct.stats()
            held = {**held, **direct, "held_bytes": held["held_bytes"] + direct["held_bytes"]}
        keys = self.keys.compressed_keys()
        return held | self.keys.encoded_bytes() | ({"compressed_keys": keys} if keys else {})

    # --- optimizers

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        """Each worker keeps a copy for the parts it owns."""
        self._drain("set_optimizer")
        slot, key_ids, pickled = self._session.agree_on_optimizer(optimizer, keys)
        self._rows.set_optimizer(slot, pickled, key_ids)
        self.keys.set_optimizer(slot, cloudpickle.loads(pickled), key_ids)
        if self._rows.any:  # no rows may come to an owner that has not set it yet
            self._session.agree("set_optimizer in place", None, "set_optimizer")

    def compare_updates(self, optimizer: Optimizer, keys: Sequence[Key]) -> None:
        """Owners are told that they apply nothing."""
        self._drain("set_optimizer")
        slot, key_ids = self._session.agree_on_own_updates(optimizer, keys)
        self.keys.set_optimizer(slot, optimizer.attributes(), key_ids)

    def _drain(self, call: str) -> None:
        """Wait until all rounds that this worker has pushed are done."""
        self.keys.drain(call)
        self._rows.client.settle(call)

    # --- buckets

    def bucket(self, keys: Sequence[Key]) -> Travelling:
        """Let keys that were never pushed travel together.

        Each travels alone where a key cannot share a buffer: all workers share the host memory that it is in, a key has
        a communicator of its own, or an optimizer needs the whole of a key.
        """
        session = self._session
        travelling = Bucketed(session, self._queues, self.keys.start)
        infos = [session.infos[key] for key in keys]
        if self.keys.direct is not None:
            infos = [info for info in infos if info.space == DEVICE]
        optimizers = [self.keys.owner.optimizer_of(info.id) for info in infos]
        if not infos or self.keys.communicators is not None or session.num_workers == 1:
            return travelling
        if not all(optimizer is None or optimizer.elementwise for optimizer in optimizers):
            return travelling
        self.keys.join(agreed_buckets(session, infos, self._queues))
        return travelling

    # --- states

    def save_states(self, write: Write) -> None:
        """Gather the states at worker 0."""
        self._drain(SAVE)
        self._session.agree(SAVE, None, SAVE)  # all are here to send their parts
        dense = collect(self.keys.owner, self.keys.owned(self._session.rank))
        mine = records_to_bytes([*dense, *self._rows.states()])
        gathered = self._session.gather(SAVE, mine)
        self._session.decide(SAVE, lambda: write([records_from_bytes(blob) for blob in gathered]))

    def load_states(self, read: Read) -> Loaded:
        """Worker 0 gives each worker its part."""
        self._drain(LOAD)
        parts: list[bytes] = []

        def cut() -> Loaded:
            file = read()
            for rank in range(self._session.num_workers):
                owned = [*self.keys.owned(rank), *self._rows.client.owned(rank)]
                parts.append(records_to_bytes(distribute(file, owned)))
            return restored(file)

        keys, configs = self._session.decide(LOAD, cut)
        given = self._session.scatter(LOAD, parts)
        replaced = [self._session.infos[key].id for key in keys]
        mine = records_from_bytes(given)
        with self._session.engine.lock:
            self._rows.load(mine, replaced)
            for key_id in replaced:
                self.keys.owner.states.pop(key_id, None)
            for part in mine:
                if not self._session.infos[part.key].sparse:
                    self.keys.owner.set_state(self._session.infos[part.key], part.state)
        return keys, configs

    def codec_states(self, call: str) -> list[StateRecord]:
        """After the rounds that this worker has pushed."""
        self.keys.drain(call)
        self._session.agree(call, None, call)  # all are here to send what follows
        return self.keys.codec_states()

    def take_codec_states(self, parts: Sequence[StateRecord]) -> None:
        """Each key its own; `load_states` has waited for all rounds."""
        self.keys.take_codec_states(parts)

    # --- the end

    def close(self) -> None:
        """Wait until all workers close; what they pushed in common is done first."""
        common, error = self._session.leave(matched=True)
        refused: ConfigError | None = None
        try:
            self.keys.drain("close", common)
        except ConfigError as found:
            refused = found
        self._rows.close()
        if self.keys.hosts is not None:  # before any worker frees device memory that others read
            self._session.wait(Pending(self.keys.hosts.close(), Waiting("close")))
        if error is not None:  # told first: where a worker is gone, what MPI still makes is waited for in vain
            raise error
        if self.keys.communicators is not None:
            self._session.wait_for(Predicate(self.keys.communicators.all_made), "close")
            self.keys.communicators.free()
        if self.keys.nccl is not None:
            self.keys.nccl.close()
        self._session.end()
        if refused is not None:
            raise refused
