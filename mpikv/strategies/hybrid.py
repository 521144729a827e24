"""The strategy of synchronous stores whose workers own keys: a key is one of two others, or both's.

Workers own the elements of a key before its cut, and owners reached by messages the others (placement/cut.py). A key is
one of `AllreduceStrategy` where workers own some of it, or where those of a host add it; the path of a divided one asks
the servers for their part (divided_path.py). All others are keys of `PsStrategy`. Where a call has keys of one of the
two only, it is that one's call.

The cut is part of what the workers agree on at `init`. It moves once: when an optimizer is set that needs all elements
of a key at one owner, a key that is divided goes to the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.codecs.compression import wire_of
from mpikv.common.checks import shown
from mpikv.errors import ConfigError
from mpikv.hostmemory.segment import HostMemory
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import StatesFile
from mpikv.placement import described
from mpikv.placement.cut import cut_of
from mpikv.placement.keys import Key, KeyInfo
from mpikv.session.agreed_keys import KeyEvents
from mpikv.session.agreement import Disagreement
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.strategies.allreduce import AllreduceStrategy
from mpikv.strategies.base import Entry, PreparedCall, wait_for_all
from mpikv.strategies.exchange import too_many
from mpikv.strategies.ps import PsCall, PsStrategy
from mpikv.strategies.workers import WorkersStrategy


class HybridCall(PreparedCall):
    """One call with keys of both kinds. ring, servers: their calls. in_ring: for each key, whether `ring` has it."""

    def __init__(self, session: Workers, ring: PreparedCall, servers: PsCall, in_ring: Sequence[bool]) -> None:
        self._session, self._ring, self._servers, self._in_ring = session, ring, servers, in_ring

    def start(self, priority: int = 0) -> list[Pending]:
        """Start both calls: the servers' first, whose messages leave at once."""
        call = self._servers  # without its `start`, which would be a function more on the way to the transport
        of_servers = iter(call.strategy.start(call.entries, priority, call.op))
        of_ring = iter(self._ring.start(priority))
        each = (next(of_ring if ring else of_servers, None) for ring in self._in_ring)
        return [one for one in each if one is not None]  # nothing, where nothing is pulled

    def wait(self, pending: Sequence[Pending]) -> None:
        wait_for_all(self._session, pending)

    def release(self) -> None:
        self._ring.release()
        self._servers.release()


class HybridStrategy(WorkersStrategy):
    def __init__(self, session: Workers, ring: AllreduceStrategy, servers: PsStrategy) -> None:
        super().__init__(session)
        self.ring, self.servers, self.rows = ring, servers, servers.rows
        self.first_values = servers.first_values = ring.keys.first_values
        self._cuts: dict[int, int] = {}
        agreed = None if ring.events.agreed is None else self._agreed
        self.events = KeyEvents(self._reserve, self._begin, self._broken, self._pushes, agreed)

    # --- keys

    def _reserve(self, info: KeyInfo) -> Any:
        """Cut a key, at worker 0. Returns the cut, whether the key has a queue, its place, and what servers need."""
        members, wire_ = self._session.members, wire_of(info)
        updated, whole = self._session.optimizer_of(info) is not None, self.servers.takes_whole
        cut = cut_of(members, info, wire_, whole=whole, updated=updated)
        if members.workers_own and self._has_owners(info, cut):
            problem = too_many(len(members.workers), f"workers, all owners of key {shown(info.key)}")
            if problem and (info.sparse or wire_.codec or wire_.back):
                raise Disagreement(ConfigError, problem)
            cut = info.n_elems if problem else cut
        if not self._has_owners(info, cut):
            return [cut, True, self.ring.events.reserve(info), None]
        place = None
        if members.adds_on_hosts and (cut or members.is_added_on_hosts(info)):
            place = self.ring.keys.reserve_divided(info)  # None: the memory is full
        return [cut, cut > 0 or place is not None, place, self.servers.place(info, cut)]

    def _has_owners(self, info: KeyInfo, cut: int) -> bool:
        """Whether owners have elements of a key, or all of its none."""
        return cut < info.n_elems or info.sparse or (not info.n_elems and not self._session.members.workers_own)

    def _begin(self, info: KeyInfo, reserved: Any) -> None:
        cut, in_ring, place, of_servers = reserved
        self._cuts[info.id] = cut
        members = self._session.members
        if members.servers:
            self._session.log.detail(lambda: described.cut(members, info, cut))
        if self._has_owners(info, cut):
            if in_ring:
                self.servers.speaker.pushers[info.id] = () if place is None else members.speakers
                self.ring.keys.cuts[info.id] = cut
            self.servers.events.begin(info, of_servers)
        if in_ring:
            self.ring.events.begin(info, place)

    def _broken(self, info: KeyInfo) -> None:
        del self._cuts[info.id]
        self.ring.events.broken(info)
        self.servers.events.broken(info)

    def _agreed(self, info: KeyInfo) -> None:
        if info.id in self.ring.keys.queues and self.ring.events.agreed is not None:
            self.ring.events.agreed(info)

    def _pushes(self) -> dict[int, int]:
        return {**self.ring.events.pushes(), **self.servers.events.pushes()}

    def wait_for_values(self, agreed: Sequence[KeyInfo]) -> None:
        self.ring.wait_for_values(agreed)

    # --- calls

    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        if not self.servers.has_owners:  # as on one host: no key has any
            return self.ring.prepare(entries, op, waits=waits)
        if op.whole and self._session.members.servers:
            on_servers = [one for one in entries if self._cuts[one.info.id] < one.info.n_elems]
            if on_servers:
                return self.servers.prepare(on_servers, op)  # which refuses it
        queues = self.ring.keys.queues
        in_ring = [entry.info.id in queues for entry in entries]
        if all(in_ring):
            return self.ring.prepare(entries, op, waits=waits)
        if not any(in_ring):
            return self.servers.prepare(entries, op, waits=waits)
        ring = self.ring.prepare([entry for entry in entries if entry.info.id in queues], op)
        servers = self.servers.prepare([entry for entry in entries if entry.info.id not in queues], op)
        return HybridCall(self._session, ring, servers, in_ring)

    # --- optimizers and states

    def settle(self, call: str) -> None:
        self.ring.settle(call)
        self.servers.settle(call)

    def use_optimizer(self, slot: int, pickled: bytes, key_ids: list[int], *, elementwise: bool) -> None:
        """Both; divided keys go to the servers whole first, where the optimizer needs all of a key at one owner."""
        moved: list[KeyInfo] = []
        if not elementwise:
            slots, cuts = self._session.slot_of, self.ring.keys.cuts
            moved = [info for info in self._session.in_order() if slots(info) == slot and cuts.get(info.id)]
        values = {info.id: self.ring.keys.queues[info.id].value() for info in moved}
        self.servers.before_cut = {key_id: value[: self._cuts[key_id]] for key_id, value in values.items()}
        self.servers.use_optimizer(slot, pickled, key_ids, elementwise=elementwise)
        self.servers.before_cut = {}
        with self._session.engine.lock:
            for info in moved:
                self._cuts[info.id] = self.ring.keys.cuts[info.id] = 0
        self.ring.use_optimizer(slot, pickled, key_ids, elementwise=elementwise)

    def use_attributes(self, slot: int, attributes: dict[str, Any], key_ids: list[int]) -> None:
        self.ring.use_attributes(slot, attributes, key_ids)
        self.servers.use_attributes(slot, attributes, key_ids)

    def settle_all(self, call: str) -> None:
        self.ring.settle_all(call)
        self.servers.settle_all(call)

    def cuts(self) -> dict[Key, int]:
        """None without servers: there each key has owners of one kind, which their number decides."""
        if self._session.members.workers_own:
            return {}
        return {info.key: self._cuts[info.id] for info in self._session.in_order() if not info.sparse}

    def gather_states(self) -> Callable[[], list[list[StateRecord]]]:
        of_ring, of_servers = self.ring.gather_states(), self.servers.gather_states()
        return lambda: [*of_ring(), *of_servers()]

    def send_states(self, file: StatesFile) -> None:
        self.ring.send_states(file)
        self.servers.send_states(file)

    def take_states(self, replaced: Sequence[KeyInfo]) -> None:
        self.ring.take_states(replaced)
        self.servers.take_states(replaced)

    def codec_states(self, call: str) -> list[StateRecord]:
        return [*self.ring.codec_states(call), *self.servers.codec_states(call)]

    def take_codec_states(self, parts: Sequence[StateRecord]) -> None:
        self.ring.take_codec_states(parts)
        self.servers.take_codec_states(parts)

    # --- the rest

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        members = self._session.members
        has_memory = members.workers_own or members.ring_has_memory
        return (self.ring if has_memory else self.servers).allocate(text, n_bytes)

    def reserve(self, n_bytes: int) -> tuple[HostMemory, int | None] | None:
        return self.ring.reserve(n_bytes)

    def ask_servers(self, request: bytes, number: int | None = None) -> list[bytes]:
        return self.servers.ask_servers(request, number)

    def stats(self) -> dict[str, Any]:
        """What both count is added. servers_take: the servers' share of each key, by its name."""
        of_ring, found = self.ring.stats(), dict(self.servers.stats())
        dense = [info for info in self._session.in_order() if not info.sparse and info.n_elems]
        if self._session.members.servers:
            found["servers_take"] = {str(info.key): 1 - self._cuts[info.id] / info.n_elems for info in dense}
        for name, value in of_ring.items():
            there = found.get(name)
            found[name] = value if there is None else there | value if isinstance(value, dict) else there + value
        return found

    def leave(self, common: Mapping[int, int]) -> ConfigError | None:
        refused = self.ring.leave(common)
        return self.servers.leave(common) or refused

    def free(self) -> None:
        self.ring.free()
        self.servers.free()
