"""The keys with owners: server ranks, or a service inside every worker, which is the same code.

Worker 0 sends a key's first value; an owner keeps requests that arrive earlier until it has that value. What is pushed
and pulled afterwards, and how it is waited for, is in owned_calls.py.

In a synchronous store without servers the services begin with the first key that has owners (placement/cut.py), on
which all workers agree. Optimizers that were set before, and changed attributes, are brought to them then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs import compression
from mpikv.engine.operation import Predicate, Steps
from mpikv.engine.running import Running
from mpikv.errors import ConfigError
from mpikv.optimizers.owner import Owner
from mpikv.placement import described
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.owners import add_load, as_announced, at_one, place_at_owners
from mpikv.placement.placement import Placement
from mpikv.session.base import Pending
from mpikv.session.rules import MOVE
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import HOST
from mpikv.strategies.base import Sink
from mpikv.strategies.client_key import ClientKey, Route
from mpikv.strategies.divided_path import Speaker
from mpikv.strategies.exchange import Client, Item, too_many, wait_for_tags
from mpikv.strategies.owned_calls import OwnedCalls
from mpikv.strategies.pieces import encoded_bytes
from mpikv.strategies.sparse import RowClient
from mpikv.transports import wire
from mpikv.transports.base import Transport
from mpikv.transports.loopback import Loopback


class OwnService(NamedTuple):
    """The owner inside this worker (server/core), and its loop. transport: that of the loop. loopback: what this worker
    sends itself.

    held_bytes: what it holds of dense keys and of rows.
    """

    owner: Owner
    steps: Steps[None]
    transport: Transport
    loopback: Loopback
    held_bytes: Callable[[], tuple[int, int]]


class OwnedKeys:
    """Those of one worker. own: the owner inside of it, if any.

    speaker: asks for the servers' parts of divided keys. first_values: at worker 0, of keys that are being agreed on.
    """

    def __init__(self, session: Workers, own: OwnService | None = None) -> None:
        self._session = session
        self.first_values: dict[Key, Any] = {}
        members = self._members = session.members
        self._servers, self._own = members.owners, own
        if not members.workers_own and (problem := too_many(len(self._servers), "servers")):
            raise ConfigError(problem)
        self._labels = members.owner_labels
        self._keys: dict[int, ClientKey] = {}
        self._recorder = session.recorder
        self._loads = [0] * len(self._servers)
        self._local = session.links  # the transport that reaches servers of this host through shared memory, if any
        transport, number, loopback = session.transport if self._local is None else self._local, None, None
        if own is not None:
            transport, number, loopback = own.transport, self._servers.index(transport.rank), own.loopback
        self._client = Client(transport, self._servers, number, loopback)
        session.messages.acts["fetch"] = self._client.asked_for
        self.rows = RowClient(session, self._client, self._labels)
        self._engine = session.engine
        self._engine.serves = self._local is not None and own is not None
        session.on_attributes.append(self._send_attributes)
        self.calls = OwnedCalls(session, self._client, self._keys, self._labels, own=own is not None)
        self.speaker = Speaker(session, self._client, self._keys, self.calls)
        self._service: Running[None] | None = None
        self._optimizers: list[tuple[int, bytes, list[int]]] = []  # set before the owners begin
        self._attributes: dict[int, tuple[int, dict[str, Any]]] = {}  # changed before then, by slot, with their number
        self.has_owners = not members.workers_own
        if self.has_owners and own is not None:
            self._service = self._engine.serve(own.steps, "server")
        self._rank, self.synchronous = session.rank, session.synchronous
        if not members.workers_own:
            session.before_barrier.append(lambda: self.settle("barrier"))

    # --- keys as they are agreed on

    def place(self, info: KeyInfo, begin: int = 0) -> Any:
        """Place a key, at worker 0, so that servers own about equal bytes. All servers have rows of row-sparse keys.

        begin: the first element that servers own.
        """
        if info.sparse:
            return None
        placement = place_at_owners(
            self._members,
            info,
            compression.wire_of(info),
            whole=self._session.needs_whole(info),
            updated=self._session.optimizer_of(info) is not None,
            load_bytes=self._loads,
            begin=begin,
        )
        add_load(self._loads, placement, info.dtype.itemsize)
        return placement.announced()

    def begin(self, info: KeyInfo, reserved: Any) -> None:
        if not self.has_owners:
            self._begin_owners()
        if info.sparse:
            self.rows.begin(info, None if self._rank else self.first_values[info.key])
            return
        wire_ = compression.wire_of(info)
        placement = as_announced(self._members, info, reserved, wire_)
        # Where others go on, they know of what they have how many pushes are in it: so each is applied to all of a key.
        key = self._keys[info.id] = ClientKey(
            info,
            placement,
            space=self._session.spaces.of(info),
            recorder=self._recorder,
            pushers=self.speaker.pushers.get(info.id, ()),
            whole=self._members.keeps or self._session.needs_whole(info),
        )
        if self._session.log.detailed():
            self._session.log.detail(lambda: described.line(self._members, info, placement, wire_))
        if self._rank == 0:
            value = self.first_values[info.key]
            self._send_value(key, value if info.space == HOST else self._session.spaces.of(info).to_host(value))

    def _begin_owners(self) -> None:
        """Let this worker own keys, as all workers do that agree on the first key with owners."""
        assert self._own is not None
        self.has_owners = True
        for slot, pickled, key_ids in self._optimizers:
            self._own.owner.set_optimizer(slot, cloudpickle.loads(pickled), key_ids)
        for slot, (number, attributes) in self._attributes.items():
            self._send_attributes(slot, number, attributes)
        self._service = self._engine.serve(self._own.steps, "owner")

    def forget(self, info: KeyInfo) -> None:
        self._keys.pop(info.id, None)
        self.rows.forget(info)

    def pushes(self) -> dict[int, int]:
        own = {key_id: key.pushed for key_id, key in self._keys.items() if key_id not in self.speaker.pushers}
        return {**own, **self.rows.pushes()}

    # --- messages

    def _send(self, server: int, header: wire.Header, payload: HostArray | bytes | None = None) -> None:
        with self._engine.lock:
            self._client.send(server, [(header, payload)])

    def _all_sent(self) -> bool:
        flushed = self._local is None or self._local.flushed
        return self._client.all_sent() and not self._client.unsent and flushed

    def _ask(self, kind: int, payloads: Sequence[bytes | None], call: str, first: int = 0) -> list[bytes]:
        """Send each server, from the first on, a request, and return their answers, of any length. Blocks."""
        self._wait_for_device_calls()
        wait_for_tags(self._session, self._client, len(payloads))
        answers = [
            (server, self._engine.start(self._client.ask(server, wire.Header(kind), payload), call))
            for server, payload in enumerate(payloads, first)
        ]
        for server, running in answers:
            self._session.wait_for(running, call, (self._labels[server],))
        return [running.result or b"" for _, running in answers]

    def ask_servers(self, request: bytes, number: int | None = None) -> list[bytes]:
        if not self._members.servers:
            return []  # they are in the workers, whose timelines have what they do
        payloads = [request] * (len(self._members.servers) if number is None else 1)
        return self._ask(wire.TIMELINE, payloads, "timeline", number or 0)

    def _wait_for_device_calls(self) -> None:
        """Wait until all calls have been sent: those with arrays on a GPU may wait for copies."""
        device = self.calls.device
        if device is not None and device.waiting:
            self._session.wait_for(Predicate(lambda: not device.waiting), "wait for earlier pushes and pulls")

    def _send_value(self, key: ClientKey, value: HostArray) -> None:
        for server, header, payload in key.first_values(value):
            self._send(server, header, payload)

    # --- optimizers

    def _send_attributes(self, slot: int, number: int, attributes: dict[str, Any]) -> None:
        if not self.has_owners:
            self._attributes[slot] = number, attributes
            return
        text = json.dumps([slot, attributes]).encode()
        with self._engine.lock:
            self._client.send_before(wire.Header(wire.ATTRIBUTES, attributes_id=number), text)

    def settle(self, call: str) -> None:
        """Wait until every owner has processed this worker's messages. Rounds may still wait for other workers.

        At the end of a synchronous store there is nothing to wait for: `leave` says to each owner what comes last.
        """
        if self.has_owners and not (call == "close" and self._members.workers_own):
            self._ask(wire.FLUSH, [None] * len(self._servers), call)

    def use_optimizer(
        self,
        slot: int,
        pickled: bytes,
        key_ids: list[int],
        *,
        elementwise: bool,
        before_cut: Mapping[int, SpaceArray],
    ) -> None:
        """Let owners update keys with an optimizer that all agreed on. Collective, blocks.

        before_cut: by the number of a divided key that owners get all of, the elements that workers own.
        """
        self._move_keys(slot, before_cut, whole=not elementwise)
        self._send_optimizer(slot, pickled, key_ids)

    def use_attributes(self, slot: int, attributes: dict[str, Any], key_ids: list[int]) -> None:
        """Let owners compare these attributes, of an optimizer that workers apply by themselves. Collective, blocks."""
        self._send_optimizer(slot, cloudpickle.dumps(attributes), key_ids)

    def _send_optimizer(self, slot: int, pickled: bytes, key_ids: list[int]) -> None:
        """Send an optimizer, or its attributes, from worker 0 to the owners, and wait for it. Collective."""
        if not self.has_owners:
            self._optimizers.append((slot, pickled, key_ids))
            self._attributes.pop(slot, None)
            return

        def send() -> None:
            payload = cloudpickle.dumps((slot, cloudpickle.loads(pickled), key_ids))
            for answer in self._ask(wire.OPTIMIZER, [payload] * len(self._servers), "set_optimizer"):
                if answer[1:]:
                    raise ConfigError(answer[1:].decode())

        self._session.decide("set_optimizer in place", send)

    def _move_keys(self, slot: int, before_cut: Mapping[int, SpaceArray], *, whole: bool) -> None:
        """Move keys that are cut to one owner each, if the optimizer needs them `whole`; cut replicated ones.

        Keys that it needs whole and the last one did not, or the other way round, get new units at their owner.
        Worker 0 pulls and sends the values. ConfigError where workers have not pushed these keys equally often.
        """
        if self._members.keeps:
            return
        # Not those that are row-sparse, or of which all goes round the ring.
        served = [self._keys[one.id] for one in self._session.in_order() if one.id in self._keys]
        served = [key for key in served if self._session.slot_of(key.info) == slot]
        moved: list[tuple[ClientKey, Placement]] = []
        for key in served:
            info = key.info
            if whole and len(key.routes) + (info.id in before_cut) > 1:
                at = info.id % len(self._servers)
                moved.append((key, at_one(self._members, info, at, key.placement.partition_elems)))
            elif key.replicated:
                moved.append((key, place_at_owners(self._members, info, compression.wire_of(info), updated=True)))
            elif whole != key.whole and len(key.pieces) > 1:
                moved.append((key, key.placement))
        if moved and self.synchronous:  # a round that is not complete would be lost
            self._session.agree(MOVE, [(key.info.key, key.pushed) for key, _ in moved], "set_optimizer")
        for key in served:
            key.whole = whole
        for key, placement in moved:
            if self._rank == 0:
                value: HostArray = self._session.spaces.host.empty(key.info.n_elems, key.info.dtype)
                self._pull_uncompressed(key, [value])
                if (before := before_cut.get(key.info.id)) is not None:
                    value[: before.size] = before
                for route in key.routes:
                    self._send(route.owner, wire.Header(wire.REMOVE, key.info.id))
                key.use_placement(placement)
                self._send_value(key, value)
            key.use_placement(placement)

    def _pull_uncompressed(
        self, key: ClientKey, outs: Sequence[HostArray], routes: Sequence[Route] | None = None
    ) -> None:
        """Pull a key's value uncompressed and wait for it, so that a codec of answers keeps its state. Blocks."""
        sink = Sink(key.info, outs, self._session.spaces)
        item = Item(key, None, sink, routes or key.answering, key.pushed, flags=wire.UNCOMPRESSED_ANSWER)
        wait_for_tags(self._session, self._client, *self._client.tags_needed([item]))
        running = self._engine.start(self.calls.steps(wire.PULL, [item], 0), "pull")
        self._session.wait(Pending(running, self.calls.waiting("pull", key)))

    def settle_all(self, call: str) -> None:
        """Wait until everything that all workers pushed so far has been applied. Collective, blocks."""
        if not self.has_owners:
            return
        if self.synchronous:
            for key in tuple(self._keys.values()):
                self._pull_uncompressed(key, [])
            self.rows.settle(call)
        else:
            self.settle(call)
            self._session.agree(call, None, call)

    # --- the end

    def leave(self) -> None:
        """Say to each owner what comes last, when all workers have agreed to close. Blocks."""
        if not self.has_owners:
            return
        for server in range(len(self._servers)):
            self._send(server, wire.Header(wire.BYE))
        self._session.wait_for(Predicate(self._all_sent), "close")
        if self._service is not None:
            self._session.wait_for(self._service, "close")

    # --- memory of the host

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        """Allocate memory of this worker that servers of its host can read; None where there are none. Collective."""
        self._session.agree("empty", [text, -1], "empty")
        return None if self._local is None else self._local.segment.take(n_bytes)

    def stats(self) -> dict[str, Any]:
        """memory_messages, memory_bytes: sent to servers of this host through shared memory.

        bytes_copied: into and out of that memory, by this worker. held_bytes: its scratch memory there. shared_bytes:
        its arrays of `store.empty`, the values that it serves, and what arrays on a GPU are copied through.
        """
        encoded, local = encoded_bytes(key.encoded for key in tuple(self._keys.values())), self._local
        if local is None and self._own is not None and self.has_owners:
            held, rows = self._own.held_bytes()
            return {**encoded, "held_bytes": held, **({"row_bytes": rows} if rows else {})}
        if local is None:
            return encoded
        return {
            **encoded,
            "memory_messages": local.sent_messages,
            "memory_bytes": local.sent_bytes,
            "bytes_copied": local.copied_bytes,
            "held_bytes": local.held_bytes,
            "shared_bytes": local.segment.taken_bytes - local.held_bytes,
        }
