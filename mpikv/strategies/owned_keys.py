"""The keys with owners: server ranks, or a service inside every worker, which is the same code.

A push is not acknowledged, since MPI loses no message. A pull names the version that it needs (synchronous) or none
(asynchronous), and the server answers when that version exists. A pushpull is both in one request. Worker 0 sends a
key's first value; a server keeps requests that arrive earlier until it has that value.

In a synchronous store without servers the services begin with the first key that has owners (placement/cut.py), on
which all workers agree. Optimizers that were set before, and changed attributes, are brought to them then.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import cloudpickle

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.arrays.reductions import REDUCTIONS, SUM, Reduction
from mpikv.codecs import compression
from mpikv.collectives import adasum
from mpikv.common.checks import shown
from mpikv.engine.operation import Completion, Operation, Predicate, Steps
from mpikv.engine.running import Running
from mpikv.errors import ConfigError, StallError, UnsupportedError
from mpikv.observe.stall import Waiting
from mpikv.optimizers.owner import DEFAULT_SLOT, Owner
from mpikv.optimizers.states import StateRecord, record_of
from mpikv.optimizers.states_file import StatesFile, records_from_bytes, records_to_bytes
from mpikv.placement import described
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import NO_OPTIMIZER, PushLabel, scaled
from mpikv.placement.owners import add_load, as_announced, at_one, place_at_owners
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import DEVICE, HOST
from mpikv.strategies.base import Entry, PreparedCall, Sink
from mpikv.strategies.client_key import ClientKey
from mpikv.strategies.device_calls import DeviceCalls
from mpikv.strategies.divided_path import Speaker
from mpikv.strategies.exchange import (
    BatchTransfer,
    Client,
    Exchange,
    Item,
    poll_briefly,
    too_many,
    wait_for_tags,
)
from mpikv.strategies.pieces import encoded_bytes
from mpikv.strategies.sparse import RowClient, push_label
from mpikv.strategies.states import LOAD, SAVE, distribute, restored
from mpikv.transports import wire
from mpikv.transports.base import Transport
from mpikv.transports.loopback import Loopback

CALLS = {wire.PUSH: "push", wire.PULL: "pull", wire.PUSHPULL: "pushpull"}


class OwnedCall(PreparedCall):
    """One call. waits: its caller waits at once, and runs the call's steps itself instead of the engine's thread."""

    def __init__(
        self, keys: OwnedKeys, session: Workers, entries: Sequence[Entry], op: Reduction, *, waits: bool
    ) -> None:
        self.keys, self._session, self.op, self._waits = keys, session, op, waits
        spaces = session.spaces
        self.entries = [
            entry if entry.outs is None else entry._replace(sink=Sink(entry.info, entry.outs, spaces))
            for entry in entries
        ]

    def start(self, priority: int = 0) -> list[Pending]:
        if not self._waits:
            return self.keys.start(self.entries, priority, self.op)
        try:
            return self.keys.start_waited(self.entries, priority, self.op)
        except KeyboardInterrupt as error:  # answers may still be received into the caller's arrays
            self._session.engine.interrupted("pushpull", error)
            raise

    def wait(self, pending: Sequence[Pending]) -> None:
        """Wait for all keys. Where the caller runs the call itself, `pending` has one transfer for all of them."""
        try:
            for one in pending:
                self._session.wait(one, None, pending)
        except (StallError, ConfigError):
            if self._waits:
                self.keys.run_by_engine(pending)
            raise
        except KeyboardInterrupt as error:
            if self._waits:
                self._session.engine.interrupted("pushpull", error)
            raise

    def release(self) -> None:
        self.valid, self.entries = False, []


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

    speaker: asks for the servers' parts of divided keys. first_values: at worker 0, of dense keys that are being agreed
    on.
    """

    def __init__(self, session: Workers, own: OwnService | None = None) -> None:
        self._session = session
        self.first_values: dict[Key, SpaceArray] = {}
        members = self._members = session.members
        self._servers, self._own = members.owners, own
        if not members.workers_own and (problem := too_many(len(self._servers), "servers")):
            raise ConfigError(problem)
        self._labels = members.owner_labels
        self._keys: dict[int, ClientKey] = {}
        self._recorder = session.recorder
        self._loads = [0] * len(self._servers)
        self.takes_whole = False  # whether the optimizer of most keys needs all elements of a key at one server
        self._local = session.links  # the transport that reaches servers of this host through shared memory, if any
        transport, number, loopback = session.transport if self._local is None else self._local, None, None
        if own is not None:
            transport, number, loopback = own.transport, self._servers.index(transport.rank), own.loopback
        self._client = Client(transport, self._servers, number, loopback)
        self._turns: deque[Completion] = deque()  # of calls that wait for others, the first of them for none
        session.messages.acts["fetch"] = self._client.asked_for
        self.rows = RowClient(session, self._client, self._labels)
        self._engine = session.engine
        self._device = self._device_calls()
        self._engine.serves = self._local is not None and own is not None
        session.on_attributes.append(self._send_attributes)
        steps = partial(self._steps, wire.PUSHPULL)
        self.speaker = Speaker(session, self._client, self._keys, self._labels, steps)
        self._service: Running[None] | None = None
        self._optimizers: list[tuple[int, bytes, list[int]]] = []  # set before the owners begin
        self._attributes: dict[int, tuple[int, dict[str, Any]]] = {}  # changed before then, by slot, with their number
        self.has_owners = not members.workers_own
        if self.has_owners and own is not None:
            self._service = self._engine.serve(own.steps, "server")
        self._rank, self.synchronous = session.rank, session.synchronous
        if not members.workers_own:
            session.before_barrier.append(lambda: self.settle("barrier"))

    def _device_calls(self) -> DeviceCalls | None:
        space, path = self._session.spaces.device, self._members.device_path
        if not isinstance(space, DeviceSpace) or path == "none":
            return None
        return DeviceCalls(self._client, space, mpi_takes_device=path == "mpi", on_lost=self._engine.fail)

    # --- keys as they are agreed on

    def place(self, info: KeyInfo, begin: int = 0) -> Any:
        """Place a key, at worker 0, so that servers own about equal bytes. All servers have rows of row-sparse keys.

        begin: the first element that servers own.
        """
        if info.sparse:
            return None
        whole, updated = self.takes_whole, self._session.optimizer_of(info) is not None
        placement = place_at_owners(
            self._members,
            info,
            compression.wire_of(info),
            whole=whole,
            updated=updated,
            load_bytes=self._loads,
            begin=begin,
        )
        add_load(self._loads, placement, info.dtype.itemsize)
        return placement.announced()

    def begin(self, info: KeyInfo, reserved: Any) -> None:
        if not self.has_owners:
            self._begin_owners()
        if info.sparse:
            self.rows.begin(info)
            return
        wire_ = compression.wire_of(info)
        placement = as_announced(self._members, info, reserved, wire_)
        key = self._keys[info.id] = ClientKey(
            info,
            placement,
            space=self._session.spaces.of(info),
            recorder=self._recorder,
            pushers=self.speaker.pushers.get(info.id, ()),
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
        payloads = [request] * (len(self._servers) if number is None else 1)
        return self._ask(wire.TIMELINE, payloads, "timeline", number or 0)

    def _wait_for_device_calls(self) -> None:
        """Wait until all calls have been sent: those with arrays on a GPU may wait for copies."""
        device = self._device
        if device is not None and device.waiting:
            self._session.wait_for(Predicate(lambda: not device.waiting), "wait for earlier pushes and pulls")

    # --- keys

    def _send_value(self, key: ClientKey, value: HostArray) -> None:
        for server, header, payload in key.first_values(value):
            self._send(server, header, payload)

    # --- data

    def _count_push(self, info: KeyInfo) -> PushLabel:
        """Count a push, and send changed attributes before it. Returns what it is made under."""
        under = push_label(self._session, info)
        self._keys[info.id].pushed += 1
        self._session.activity.note(f"push of key {shown(info.key)}")
        return under

    def _send_attributes(self, slot: int, number: int, attributes: dict[str, Any]) -> None:
        if not self.has_owners:
            self._attributes[slot] = number, attributes
            return
        text = json.dumps([slot, attributes]).encode()
        with self._engine.lock:
            self._client.send_before(wire.Header(wire.ATTRIBUTES, attributes_id=number), text)

    def _items(self, entries: Sequence[Entry], op: Reduction = SUM) -> list[Item]:
        """Make the items of a call's keys and count pushes. Blocks until there are tags for all messages."""
        items = []
        for info, total, sink, _ in entries:
            key, under = self._keys[info.id], NO_OPTIMIZER if total is None else self._count_push(info)
            pushed = None if total is None else scaled(self._session.spaces.of(info), total, under.ratio)
            flags = self._uncompressed_flags(key, op, pushes=total is not None)
            items.append(Item(key, pushed, sink, key.routes, key.pushed, under.number, op, flags))
        wait_for_tags(self._session, self._client, *self._client.tags_needed(items))
        return items

    def _uncompressed_flags(self, key: ClientKey, op: Reduction, *, pushes: bool = True) -> int:
        """The flags of a call: all uncompressed if it is no sum, or while the session has suspended compression."""
        uncompressed = self._session.compressions.suspended or not op.adds
        if pushes:
            key.last_uncompressed = uncompressed
        if uncompressed:
            return wire.UNCOMPRESSED_PUSH | wire.UNCOMPRESSED_ANSWER
        return wire.UNCOMPRESSED_ANSWER if key.answers_uncompressed else 0

    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> OwnedCall:
        if op.whole and entries and not self._members.workers_own:
            raise UnsupportedError(
                f"pushpull of key {shown(entries[0].info.key)} with op={op.name!r}: servers have the key, or a part of "
                "it, and get it from each worker shard by shard, but what becomes of one element depends on all of "
                "them; use a store without servers, or set MPIKV_SERVERS_TAKE=0"
            )
        if len(entries) * len(self._servers) > self._client.payload_tags.count:  # hardly ever
            self._client.check_call([self._keys[entry.info.id] for entry in entries])
        lent = all(entry.outs is not None for entry in entries)
        return OwnedCall(self, self._session, entries, op, waits=waits and lent)

    def start(self, entries: Sequence[Entry], priority: int, op: Reduction) -> list[Pending]:
        items = self._items(entries, op)
        if not items:
            return []
        pushes, pulls = items[0].total is not None, items[0].sink is not None
        kind = wire.PUSHPULL if pushes and pulls else wire.PUSH if pushes else wire.PULL
        call = CALLS[kind] if not op.whole else f"pushpull(op={op.name!r})"
        # As `Engine.start` does, with a function less between the call and the transport.
        running = self._engine.take(Running(self._steps(kind, items, priority), call, started=True))
        return self._pending(running, [self._waiting(call, item.key) for item in items]) if pulls else []

    def _steps(self, kind: int, items: Sequence[Item], priority: int) -> Steps[None]:
        device, before = self._device, None
        if items[0].op.whole:
            items, before = self._combined(items)
        calls = device if device is not None and device.concerns(items) else self._client
        steps = calls.exchange(kind, items, wire.clamped(priority))
        if before is not None or self._turns:
            steps = self._in_turn(steps, before)
        return self._recorded(steps, items) if self._recorder.on else steps

    def _combined(self, items: Sequence[Item]) -> tuple[list[Item], Steps[None]]:
        """What owners get of a reduction of whole values, and the steps that write it there.

        The workers combine their values by themselves, all to the same bits, of which an owner takes the maximum.
        """
        made, combinings = list[Item](), list[tuple[KeyInfo, HostArray, SpaceArray]]()
        for item in items:
            info, space = item.key.info, self._session.spaces.of(item.key.info)
            on_host = space.to_host(item.total) if info.space == DEVICE else item.total
            assert on_host is not None
            total = space.empty(info.n_elems, info.dtype)
            combinings.append((info, on_host.astype(sum_dtype(info.dtype)), total))
            made.append(item._replace(total=total, op=REDUCTIONS["max"]))

        def combine() -> Steps[None]:
            for info, values, total in combinings:
                yield from adasum.allreduce(self._session.group, values, wire.key_tag(info.id, 3))
                self._session.spaces.write(HOST, total, values, "the result")

        return made, combine()

    def _in_turn(self, steps: Steps[None], before: Steps[None] | None) -> Steps[None]:
        """Begin an exchange when all earlier calls have, since owners must get a worker's calls in their order."""
        turn = Completion()
        self._turns.append(turn)
        if len(self._turns) == 1:
            turn.finish()
        try:
            if before is not None:
                yield from before
            yield turn
        finally:
            self._turns.remove(turn)
            if self._turns:
                self._turns[0].finish()
        yield from steps  # which sends everything before it waits

    def _recorded(self, steps: Steps[None], items: Sequence[Item]) -> Steps[None]:
        begun_s = self._recorder.now_s()
        yield from steps
        self._record(items, begun_s)

    def _record(self, items: Sequence[Item], begun_s: float) -> None:
        """Record a call that has ended: its keys have one begin in common."""
        for item in items:
            kind, n_bytes = ("pull", 0) if item.total is None else ("exchange", int(item.total.nbytes))
            self._recorder.add(kind, begun_s, item.key.info.key, item.round, n_bytes)

    def start_waited(self, entries: Sequence[Entry], priority: int, op: Reduction) -> list[Pending]:
        """Start a `pushpull` whose steps the waiting thread runs."""
        alone = self._own is None and (self._device is None or not self._device.waiting)
        if len(entries) == 1 and alone and self._keys[entries[0].info.id].can_ask_small:
            return self._start_small(entries[0], op)
        items = self._items(entries, op)
        if not items:
            return []
        exchange = Exchange(self._steps(wire.PUSHPULL, items, priority))
        with self._engine.lock:
            exchange.running.advance()
        call = "pushpull" if not op.whole else f"pushpull(op={op.name!r})"
        return self._pending(exchange, [self._waiting(call, item.key) for item in items])[:1]

    def _start_small(self, entry: Entry, op: Reduction) -> list[Pending]:
        """Start a pushpull of one small shard with the least latency: tests for the answer before all other work."""
        if not self._client.reply_tags.left:
            wait_for_tags(self._session, self._client, 1)
        info, total, sink = entry[:3]
        assert sink is not None
        key, under = self._keys[info.id], self._count_push(info)
        total = scaled(self._session.spaces.host, total, under.ratio)
        item = Item(key, total, sink, key.routes, key.pushed, under.number, op, self._uncompressed_flags(key, op))
        begun_s = self._recorder.now_s() if self._recorder.on else None
        value = sink.buffer()
        with self._engine.lock:
            answer, tag = self._client.ask_small(item, value)
            done = poll_briefly(answer)
        if not done:
            end = self._end_small(answer, tag, item, value, begun_s)
            return [Pending(Exchange(end), self._waiting("pushpull", key))]
        self._client.reply_tags.give([tag])
        sink.deliver(value)
        if begun_s is not None:
            self._record([item], begun_s)
        return []

    def _end_small(
        self, answer: Operation, tag: int, item: Item, value: HostArray, begun_s: float | None
    ) -> Steps[None]:
        yield answer
        self._client.reply_tags.give([tag])
        assert item.sink is not None
        item.sink.deliver(value)
        if begun_s is not None:
            self._record([item], begun_s)

    def run_by_engine(self, pending: Sequence[Pending]) -> None:
        """Let the engine run a call whose caller has given up waiting."""
        for one in pending:
            request = one.request.request if isinstance(one.request, BatchTransfer) else one.request
            if isinstance(request, Exchange):
                self._engine.take(request.running)

    def _pending(self, request: Operation, waitings: Sequence[Waiting]) -> list[Pending]:
        """Make one transfer for each key of a call; all of them are done when `request` is."""
        if len(waitings) == 1:
            return [Pending(request, waitings[0])]
        batch = BatchTransfer(request, waitings, self._session.waits.check)
        return [Pending(batch, waiting, waitings) for waiting in waitings]

    def _waiting(self, call: str, key: ClientKey) -> Waiting:
        round_ = key.pushed if self.synchronous else None
        return Waiting(call, key.info.key, key.info.id, round_, self.speaker.owners_of(key.info))

    # --- optimizers

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
        if slot == DEFAULT_SLOT:
            self.takes_whole = not elementwise
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
        """Move keys that are cut to one owner each, if the optimizer needs them `whole`; cut replicated ones."""
        for info in self._session.in_order():
            key = self._keys.get(info.id)  # None: row-sparse, or all of it goes round the ring
            if key is None or self._session.slot_of(info) != slot:
                continue
            if whole and len(key.routes) + (info.id in before_cut) > 1:
                placement = at_one(info, info.id % len(self._servers), key.placement.partition_elems)
            elif key.replicated:
                placement = place_at_owners(self._members, info, compression.wire_of(info), updated=True)
            else:
                continue
            if self._rank == 0:
                spaces = self._session.spaces
                value: HostArray = spaces.host.empty(info.n_elems, info.dtype)
                self._pull_uncompressed(key, [value])
                if (before := before_cut.get(info.id)) is not None:
                    value[: before.size] = before
                for route in key.routes:
                    self._send(route.owner, wire.Header(wire.REMOVE, info.id))
                key.use_placement(placement)
                self._send_value(key, value)
            key.use_placement(placement)

    def _pull_uncompressed(self, key: ClientKey, outs: Sequence[HostArray]) -> None:
        """Pull a key's value uncompressed and wait for it, so that a codec of answers keeps its state. Blocks."""
        sink = Sink(key.info, outs, self._session.spaces)
        item = Item(key, None, sink, key.routes, key.pushed, flags=wire.UNCOMPRESSED_ANSWER)
        wait_for_tags(self._session, self._client, *self._client.tags_needed([item]))
        running = self._engine.start(self._steps(wire.PULL, [item], 0), "pull")
        self._session.wait(Pending(running, self._waiting("pull", key)))

    def _owned(self, server: int) -> list[tuple[KeyInfo, int, int]]:
        """The spans for which a server keeps states: pieces, or whole shards where the optimizer needs them."""
        owned: list[tuple[KeyInfo, int, int]] = []
        for key in self._keys.values():
            optimizer = self._session.optimizer_of(key.info)
            for route in key.routes:
                if route.owner == server:
                    cut = optimizer is None or optimizer.elementwise
                    pieces = route.pieces if cut else ((route.begin, route.end),)
                    owned += [(key.info, begin, end) for begin, end in pieces]
        return [*owned, *self.rows.owned(server)]

    def gather_states(self) -> list[list[StateRecord]]:
        """The states of all owners, each owner's in a list. At worker 0 alone; blocks."""
        if not self.has_owners:
            return []
        return [records_from_bytes(answer) for answer in self._ask(wire.SAVE, [None] * len(self._servers), SAVE)]

    def send_states(self, file: StatesFile) -> None:
        """Give owners their states of a file. At worker 0 alone; blocks."""
        if not self.has_owners:
            return
        forget = json.dumps([self._session.infos[key].id for key in restored(file)[0]]).encode()
        owned = [self._owned(server) for server in range(len(self._servers))]
        blobs = [wire.with_text(forget, records_to_bytes(distribute(file, shards))) for shards in owned]
        self._ask(wire.LOAD, blobs, LOAD)

    def codec_states(self, call: str) -> list[StateRecord]:
        self._wait_for_device_calls()  # until all pushes have been sent, and so encoded
        return [
            record_of(key.info, begin, end, state)
            for key in self._keys.values()
            for begin, end, state in key.codec_states()
        ]

    def take_codec_states(self, parts: Sequence[StateRecord]) -> None:
        pieces: dict[Key, dict[tuple[int, int], Any]] = {}
        for part in parts:
            pieces.setdefault(part.key, {})[part.begin, part.end] = part.state
        self._wait_for_device_calls()
        with self._engine.lock:
            for key in self._keys.values():
                key.take_codec_states(pieces.get(key.info.key, {}))

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
