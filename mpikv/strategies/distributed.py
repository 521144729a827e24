"""The strategy of all stores of several workers: a key goes round the ring of the workers, to owners, or both ways.

Workers own the elements of a key before its cut, and owners reached by messages the others (placement/cut.py). A key is
one of `RingKeys` where workers own some of it, or where those of a host add it; the path of a divided one asks the
servers for their part (divided_path.py). All others are `OwnedKeys`, as all keys of asynchronous stores are. Where a
call has keys of one of the two only, it is that one's call.

The cut is part of what the workers agree on at `init`. It moves once: when an optimizer is set that needs all elements
of a key at one owner, a key that is divided goes to the servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.codecs.compression import wire_of
from mpikv.common.checks import shown
from mpikv.errors import ConfigError
from mpikv.hostmemory.segment import HostMemory
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.states import StateRecord
from mpikv.placement import described
from mpikv.placement.cut import cut_of
from mpikv.placement.keys import Key, KeyInfo
from mpikv.session.agreed_keys import KeyEvents
from mpikv.session.agreement import Disagreement
from mpikv.session.base import NewKey, Pending
from mpikv.session.workers import Workers
from mpikv.strategies.asked_owners import AskedOwners
from mpikv.strategies.base import Entry, Loaded, PreparedCall, Read, Strategy, wait_for_all
from mpikv.strategies.exchange import too_many
from mpikv.strategies.owned_calls import OwnedCall
from mpikv.strategies.ring_keys import RingKeys
from mpikv.strategies.sparse import RowClient
from mpikv.strategies.states import LOAD, restored


class MixedCall(PreparedCall):
    """One call with keys of both kinds. ring, owners: their calls. in_ring: for each key, whether `ring` has it."""

    def __init__(self, session: Workers, ring: PreparedCall, owners: OwnedCall, in_ring: Sequence[bool]) -> None:
        self._session, self._ring, self._owners, self._in_ring = session, ring, owners, in_ring

    def start(self, priority: int = 0) -> list[Pending]:
        """Start both calls: the owners' first, whose messages leave at once."""
        call = self._owners  # without its `start`, which would be a function more on the way to the transport
        of_owners = iter(call.calls.start(call.entries, priority, call.op))
        of_ring = iter(self._ring.start(priority))
        each = (next(of_ring if ring else of_owners, None) for ring in self._in_ring)
        return [one for one in each if one is not None]  # nothing, where nothing is pulled

    def wait(self, pending: Sequence[Pending]) -> None:
        wait_for_all(self._session, pending)

    def release(self) -> None:
        self._ring.release()
        self._owners.release()


class DistributedStrategy(Strategy):
    """All workers call its methods that are collective in the same order."""

    rows: RowClient

    def __init__(self, session: Workers, ring: RingKeys, owners: AskedOwners) -> None:
        self._session, self.ring, self.owners, self.rows = session, ring, owners, owners.rows
        owners.first_values = ring.first_values

    # --- keys

    def events(self) -> KeyEvents:
        """What it does with keys as they are agreed on, for `Workers.start`."""
        agreed = None if self.ring.communicators is None else self.ring.agreed
        return KeyEvents(self._reserve, self._begin, self._broken, self._pushes, agreed)

    def init(self, values: Sequence[NewKey]) -> None:
        first_values = self.ring.first_values
        if self._session.rank == 0:
            first_values.update({new.key: new.value for new in values})
        agreed, error = self._session.agree_on_keys(values)
        self.ring.wait_for_values(agreed)
        for new in values:
            first_values.pop(new.key, None)
        if error is not None:
            raise error

    def _reserve(self, info: KeyInfo) -> Any:
        """Cut a key, at worker 0. Returns the cut, whether the key has a queue, its place, and what owners need."""
        members, wire_ = self._session.members, wire_of(info)
        updated, whole = self._session.optimizer_of(info) is not None, self._session.needs_whole(info)
        cut = cut_of(members, info, wire_, whole=whole, updated=updated)
        if members.workers_own and self._has_owners(info, cut):
            problem = too_many(len(members.workers), f"workers, all owners of key {shown(info.key)}")
            if problem and (info.sparse or wire_.codec or wire_.back):
                raise Disagreement(ConfigError, problem)
            cut = info.n_elems if problem else cut
        if not self._has_owners(info, cut):
            return [cut, True, self.ring.reserve_place(info), None]
        place = None
        if members.adds_on_hosts and (cut or members.is_added_on_hosts(info)):
            place = self.ring.reserve_divided(info)  # None: the memory is full
        return [cut, cut > 0 or place is not None, place, self.owners.place(info, cut)]

    def _has_owners(self, info: KeyInfo, cut: int) -> bool:
        """Whether owners have elements of a key, or all of its none."""
        return cut < info.n_elems or info.sparse or (not info.n_elems and not self._session.members.workers_own)

    def _cut(self, info: KeyInfo) -> int:
        """Where the elements of owners begin."""
        return self.ring.cuts.get(info.id, info.n_elems if info.id in self.ring.queues else 0)

    def _begin(self, info: KeyInfo, reserved: Any) -> None:
        cut, in_ring, place, of_owners = reserved
        members = self._session.members
        if members.divides:
            self._session.log.detail(lambda: described.cut(members, info, cut))
        if self._has_owners(info, cut):
            if in_ring:
                self.owners.speaker.pushers[info.id] = () if place is None else members.speakers
                self.ring.cuts[info.id] = cut
            self.owners.begin(info, of_owners)
        if in_ring:
            self.ring.begin(info, place)

    def _broken(self, info: KeyInfo) -> None:
        self.ring.forget(info)
        self.owners.forget(info)

    def _pushes(self) -> dict[int, int]:
        return {**self.ring.pushes(), **self.owners.pushes()}

    # --- calls

    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        if not self.owners.has_owners:  # as on one host: no key has any
            return self.ring.prepare(entries, op, waits=waits)
        if op.whole and self._session.members.servers:
            on_servers = [one for one in entries if self._cut(one.info) < one.info.n_elems]
            if on_servers:
                return self.owners.calls.prepare(on_servers, op)  # which refuses it
        queues = self.ring.queues
        in_ring = [entry.info.id in queues for entry in entries]
        if not any(in_ring):
            return self.owners.calls.prepare(entries, op, waits=waits)
        if all(in_ring):
            return self.ring.prepare(entries, op, waits=waits)
        ring = self.ring.prepare([entry for entry in entries if entry.info.id in queues], op)
        owners = self.owners.calls.prepare([entry for entry in entries if entry.info.id not in queues], op)
        return MixedCall(self._session, ring, owners, in_ring)

    # --- optimizers

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        self._settle("set_optimizer")
        slot, key_ids, pickled = self._session.agree_on_optimizer(optimizer, keys)
        moved = [] if optimizer.elementwise else self._divided(slot)
        # Divided keys go to the servers whole first, where the optimizer needs all of a key at one owner.
        before_cut = {info.id: self.ring.queues[info.id].value()[: self._cut(info)] for info in moved}
        self.owners.use_optimizer(slot, pickled, key_ids, elementwise=optimizer.elementwise, before_cut=before_cut)
        with self._session.engine.lock:
            for info in moved:
                self.ring.cuts[info.id] = 0
        if self.ring.in_use:
            self.ring.set_optimizer(slot, cloudpickle.loads(pickled), key_ids)

    def _divided(self, slot: int) -> list[KeyInfo]:
        """The keys of a slot that workers and servers share."""
        slots, cuts = self._session.slot_of, self.ring.cuts
        return [info for info in self._session.in_order() if slots(info) == slot and cuts.get(info.id)]

    def compare_updates(self, optimizer: Optimizer, keys: Sequence[Key] | None, *, scales: bool = False) -> int:
        self._settle("set_optimizer")
        slot, key_ids = self._session.agree_on_own_updates(optimizer, keys, scales=scales)
        if self.ring.in_use:
            self.ring.set_optimizer(slot, optimizer.attributes(), key_ids)
        self.owners.use_attributes(slot, optimizer.attributes(), key_ids)
        return slot

    def _settle(self, call: str) -> None:
        """Wait until what this worker pushed is where it is added, and cannot meet what follows. Blocks."""
        self._drain(call)
        self.owners.settle(call)

    def _drain(self, call: str) -> None:
        if (refused := self.ring.drain(call)) is not None:
            raise refused

    # --- states

    def cuts(self) -> dict[Key, int]:
        """None without servers: there each key has owners of one kind, which their number decides."""
        if not self._session.members.divides:
            return {}
        return {info.key: self._cut(info) for info in self._session.in_order() if not info.sparse}

    def own_states(self, call: str, *, alone: bool = False) -> list[StateRecord]:
        if not alone:
            self._settle_all(call)
        found = [*self.ring.own_states(), *self.owners.own_states(call, alone=alone)]
        return sorted(found, key=lambda record: record.begin)  # as files of states have those of one key

    def load_states(self, read: Read) -> Loaded:
        self._settle_all(LOAD)

        def give() -> Loaded:
            file = read()
            self.ring.send_states(file)
            self.owners.send_states(file)
            return restored(file)

        keys, configs = self._session.decide(LOAD, give)
        self.ring.take_states([self._session.infos[key] for key in keys])
        return keys, configs

    def _settle_all(self, call: str) -> None:
        """Wait until everything that all workers pushed so far has been applied."""
        self._drain(call)
        self.owners.settle_all(call)

    def codec_states(self, call: str) -> list[StateRecord]:
        return self.owners.codec_states(call)

    def owed(self, key: Key) -> list[StateRecord]:
        """What this worker's codec holds of a key in host memory, in copies. Local."""
        return self.owners.owed(key)

    def take_codec_states(self, parts: Sequence[StateRecord]) -> None:
        self.owners.take_codec_states(parts)

    # --- the rest

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        members = self._session.members
        has_memory = members.workers_own or members.ring_has_memory
        return (self.ring if has_memory else self.owners).allocate(text, n_bytes)

    def reserve(self, n_bytes: int) -> tuple[HostMemory, int | None] | None:
        return self.ring.reserve(n_bytes)

    def ask_servers(self, request: bytes, number: int | None = None) -> list[bytes]:
        return self.owners.ask_servers(request, number)

    def stats(self) -> dict[str, Any]:
        """What both count is added. servers_take: the servers' share of each divided key, by its name."""
        of_ring, found = self.ring.stats(), dict(self.owners.stats())
        dense = [info for info in self._session.in_order() if not info.sparse and info.n_elems]
        if self._session.members.divides:
            found["servers_take"] = {str(info.key): 1 - self._cut(info) / info.n_elems for info in dense}
        for name, value in of_ring.items():
            there = found.get(name)
            found[name] = value if there is None else there | value if isinstance(value, dict) else there + value
        return found

    def close(self) -> None:
        """Wait until all workers close. Rounds that all workers have pushed are done first."""
        session = self._session
        self.owners.settle("close")  # keys of the ring are drained when all workers have agreed
        common, error = session.leave(matched=session.synchronous)
        refused = self.ring.drain("close", common)
        self.owners.leave()
        if error is not None:  # raised before the waits below, which do not end where a worker is gone
            raise error
        self.ring.free()
        session.end()
        if refused is not None:
            raise refused
