"""The strategy of synchronous stores whose workers own keys: each key is divided between two others.

The elements of a key before its cut (placement/cut.py) are a key of `AllreduceStrategy`, the others are a key of
`PsStrategy`; either may be empty, and without servers one of them is. Both parts have the key's name and number, are
pushed together and are under way at the same time. Where a call has keys of one of the two only, it is that one's call.
Where the workers of a host add before one of them asks the servers, a key is a whole one of `AllreduceStrategy`, whose
path asks (divided_path.py).

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
from mpikv.engine.operation import Operation
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
from mpikv.strategies.base import Entry, PreparedCall, Sink, wait_for_all
from mpikv.strategies.exchange import too_many
from mpikv.strategies.ps import PsCall, PsStrategy
from mpikv.strategies.workers import WorkersStrategy


class _Both:
    """The request of a divided key: done when both parts are there and the value has been delivered."""

    def __init__(self, parts: Sequence[Operation], deliver: Callable[[], None]) -> None:
        self._parts, self._deliver, self._done = parts, deliver, False
        self._error: Exception | None = None

    def test(self) -> bool:
        """An error in the caller's arrays concerns this call alone, and stays."""
        if not self._done and all(part.test() for part in self._parts):
            self._done = True
            try:
                self._deliver()
            except Exception as error:  # noqa: BLE001 - raised below
                self._error = error
        if self._error is not None:
            raise self._error
        return self._done


class HybridCall(PreparedCall):
    """One call with keys of both kinds, or with divided ones. Valid until a key gets another cut.

    ring, servers: the calls of the parts. kinds: for each key, whether it has a part of the ring's call, and of the
    servers'; deliver: brings its value to the caller's arrays.
    """

    def __init__(
        self,
        strategy: HybridStrategy,
        session: Workers,
        ring: PreparedCall,
        servers: PsCall,
        *,
        kinds: Sequence[tuple[bool, bool]],
        deliver: Sequence[Callable[[], None]],
    ) -> None:
        self._session, self._ring, self._servers = session, ring, servers
        self._kinds, self._deliver = kinds, deliver
        self._strategy, self._moves = strategy, strategy.moves

    @property
    def valid(self) -> bool:  # type: ignore[override]
        return self._moves == self._strategy.moves

    def start(self, priority: int = 0) -> list[Pending]:
        """Start both calls: the servers' first, whose messages leave at once."""
        call = self._servers  # without its `start`, which would be a function more on the way to the transport
        on_servers = call.strategy.start(call.entries, priority, call.op)
        in_ring = self._ring.start(priority)
        if not on_servers and not in_ring:
            return []  # nothing is pulled
        of_servers, of_ring, pending = iter(on_servers), iter(in_ring), []
        for (ring, servers), deliver in zip(self._kinds, self._deliver, strict=True):
            one = next(of_servers if servers else of_ring)
            if ring and servers:
                one = one._replace(request=_Both((one.request, next(of_ring).request), deliver))
            pending.append(one)
        return pending

    def wait(self, pending: Sequence[Pending]) -> None:
        wait_for_all(self._session, pending)

    def release(self) -> None:
        self._deliver = ()
        self._ring.release()
        self._servers.release()


class HybridStrategy(WorkersStrategy):
    def __init__(self, session: Workers, ring: AllreduceStrategy, servers: PsStrategy) -> None:
        super().__init__(session)
        self.ring, self.servers, self.rows = ring, servers, servers.rows
        self.first_values = servers.first_values = ring.keys.first_values
        self._cuts: dict[int, int] = {}
        self._in_ring: dict[int, int] = {}  # so many elements of a key are a key of the ring
        self.moves = 0  # how often keys have been cut anew
        agreed = None if ring.events.agreed is None else self._agreed
        self.events = KeyEvents(self._reserve, self._begin, self._broken, self._pushes, agreed)

    # --- keys

    def _part(self, info: KeyInfo) -> KeyInfo:
        n_elems = self._in_ring[info.id]
        return info if n_elems == info.n_elems else info._replace(shape=(n_elems,))

    def _ways(self, info: KeyInfo, in_ring: int) -> tuple[bool, bool]:
        """Whether a key of which so many elements are in the ring is a key of the ring, and whether it is of owners."""
        at_owners = (
            in_ring < info.n_elems or info.sparse or (not info.n_elems and not self._session.members.workers_own)
        )
        return in_ring > 0 or not at_owners, at_owners

    def _reserve(self, info: KeyInfo) -> Any:
        members, wire_ = self._session.members, wire_of(info)
        updated, whole = self._session.optimizer_of(info) is not None, self.servers.takes_whole
        cut = cut_of(members, info, wire_, whole=whole, updated=updated)
        if members.workers_own and self._ways(info, cut)[1]:
            problem = too_many(len(members.workers), f"workers, all owners of key {shown(info.key)}")
            if problem and (info.sparse or wire_.codec or wire_.back):
                raise Disagreement(ConfigError, problem)
            cut = info.n_elems if problem else cut
        of_servers = self.servers.place(info, cut) if self._ways(info, cut)[1] else None
        of_ring = None
        if cut < info.n_elems and self._session.members.is_added_on_hosts(info):
            of_ring = self.ring.keys.reserve_divided(info)  # None: the memory is full
        self._in_ring[info.id] = in_ring = cut if of_ring is None else info.n_elems
        if of_ring is None and self._ways(info, cut)[0]:
            of_ring = self.ring.events.reserve(self._part(info))
        return [cut, in_ring, of_ring, of_servers]

    def _begin(self, info: KeyInfo, reserved: Any) -> None:
        cut, in_ring, of_ring, of_servers = reserved
        self._cuts[info.id], self._in_ring[info.id] = cut, in_ring
        if self._session.members.servers:
            self._session.log.detail(lambda: described.cut(self._session.members, info, cut))
        if cut < in_ring == info.n_elems:
            self.servers.speaker.added.add(info.id)
            self.ring.keys.cuts[info.id] = cut
        if self._ways(info, cut)[1]:
            self.servers.events.begin(info, of_servers)
        if self._ways(info, in_ring)[0]:
            self.ring.events.begin(self._part(info), of_ring)

    def _broken(self, info: KeyInfo) -> None:
        del self._cuts[info.id]
        if self._ways(info, self._in_ring[info.id])[0]:
            self.ring.events.broken(self._part(info))
        self.servers.events.broken(info)

    def _agreed(self, info: KeyInfo) -> None:
        if self._ways(info, self._in_ring[info.id])[0] and self.ring.events.agreed is not None:
            self.ring.events.agreed(self._part(info))

    def _pushes(self) -> dict[int, int]:
        return {**self.ring.events.pushes(), **self.servers.events.pushes()}

    def wait_for_values(self, agreed: Sequence[KeyInfo]) -> None:
        self.ring.wait_for_values(agreed)

    # --- calls

    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        """Divide the entries, unless all of them belong to one of the two."""
        if not self.servers.has_owners:  # as on one host: no key has any
            return self.ring.prepare(entries, op, waits=waits)
        if op.whole and self._session.members.servers:
            on_servers = [one for one in entries if self._cuts[one.info.id] < one.info.n_elems]
            if on_servers:
                return self.servers.prepare(on_servers, op)  # which refuses it
        cuts = [self._in_ring[entry.info.id] for entry in entries]
        kinds = [self._ways(entry.info, cut) for cut, entry in zip(cuts, entries, strict=True)]
        if not any(ring for ring, _ in kinds):
            return self.servers.prepare(entries, op, waits=waits)
        if not any(servers for _, servers in kinds):
            return self.ring.prepare(entries, op, waits=waits)
        of_ring, of_servers, deliver = list[Entry](), list[Entry](), list[Callable[[], None]]()
        for cut, kind, entry in zip(cuts, kinds, entries, strict=True):
            deliver.append(_nothing)
            if all(kind):
                first, rest, deliver[-1] = self._divided(entry, cut)
                of_ring.append(first)
                of_servers.append(rest)
            else:
                (of_ring if kind[0] else of_servers).append(entry)
        ring, servers = self.ring.prepare(of_ring, op), self.servers.prepare(of_servers, op)
        return HybridCall(self, self._session, ring, servers, kinds=kinds, deliver=deliver)

    def _divided(self, entry: Entry, cut: int) -> tuple[Entry, Entry, Callable[[], None]]:
        """The entries of both parts, and what brings the whole value to the caller's arrays when both are there."""
        (info, total, sink, outs), spaces = entry, self._session.spaces
        part, first = self._part(info), None if total is None else total[:cut]
        if outs is not None:
            buffer = outs[0]
            others = Sink(info, outs[1:], spaces)
            deliver: Callable[[], None] = (lambda: others.deliver(buffer)) if outs[1:] else _nothing
        elif sink is not None:
            whole, buffer = sink, sink.buffer()
            deliver = lambda: whole.deliver(buffer)  # noqa: E731
        else:
            return Entry(part, first, None), Entry(info, total, None), _nothing
        if total is None:
            pulled = Entry(part, None, Sink(part, [buffer[:cut]], spaces))
        else:
            pulled = Entry(part, first, None, (buffer[:cut],))
        return pulled, Entry(info, total, Sink(info, [buffer], spaces)), deliver

    # --- optimizers and states

    def settle(self, call: str) -> None:
        self.ring.settle(call)
        self.servers.settle(call)

    def use_optimizer(self, slot: int, pickled: bytes, key_ids: list[int], *, elementwise: bool) -> None:
        """Both; keys that are divided go to the servers first, where the optimizer needs all of a key at one owner."""
        moved: list[KeyInfo] = []
        if not elementwise:
            dense = [info for info in self._session.in_order() if not info.sparse]
            slots = self._session.slot_of
            moved = [info for info in dense if slots(info) == slot and 0 < self._cuts[info.id] < info.n_elems]
        values = {info.id: self.ring.keys.queues[info.id].value() for info in moved}
        self.servers.before_cut = {key_id: value[: self._cuts[key_id]] for key_id, value in values.items()}
        self.servers.use_optimizer(slot, pickled, key_ids, elementwise=elementwise)
        self.servers.before_cut = {}
        self.moves += bool(moved)
        for info in moved:
            with self._session.engine.lock:
                if info.id in self.servers.speaker.added:
                    self.ring.keys.cuts[info.id] = 0
                else:
                    self.ring.events.broken(self._part(info))
                    self._in_ring[info.id] = 0
                self._cuts[info.id] = 0
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


def _nothing() -> None:
    """Deliver a value that is where it belongs already."""
