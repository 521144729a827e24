"""Parameter servers: the values live with servers, which are ranks of their own or a service inside every worker.

A push has no acknowledgement, since MPI loses nothing. A pull names the version that it needs (synchronous) or none
(asynchronous), and the server answers when it exists. A pushpull is both in one request. Small keys of one call are one
message per server, large ones travel in partitions (exchange.py). Worker 0 sends a key's first value; whatever reaches
a server before it waits there.

The servers are the same code in all modes; what differs is their policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.arrays.row_ids import Ids
from mpikv.arrays.row_sparse import RowSparse
from mpikv.codecs import compression
from mpikv.codecs.choice import Choices, CodecChoice
from mpikv.common.checks import shown
from mpikv.engine.operation import Operation, Predicate, Steps
from mpikv.engine.running import Running
from mpikv.errors import ConfigError, MpikvError, StallError
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import DEFAULT_SLOT
from mpikv.optimizers.states import StateRecord, record_of
from mpikv.optimizers.states_file import records_from_bytes, records_to_bytes
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import NOTHING, Under, scaled
from mpikv.placement.on_servers import add_load, as_announced, on_server
from mpikv.placement.place import place
from mpikv.session.agreed_keys import KeyEvents
from mpikv.session.base import NewKey, Pending
from mpikv.session.workers import Workers
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import HOST
from mpikv.strategies.base import Entry, Loaded, PreparedCall, Read, Sink, Strategy, Write
from mpikv.strategies.client_key import ClientKey
from mpikv.strategies.device_calls import DeviceCalls
from mpikv.strategies.exchange import Client, EndingTogether, Exchange, Item, Target, check_owners, soon, wait_for_tags
from mpikv.strategies.pieces import encoded_bytes
from mpikv.strategies.sparse import RowClient
from mpikv.strategies.states import LOAD, SAVE, distribute, restored
from mpikv.transports import wire
from mpikv.transports.loopback import Loopback

CALLS = {wire.PUSH: "push", wire.PULL: "pull", wire.PUSHPULL: "pushpull"}


class PsCall(PreparedCall):
    """One call. waits: its caller waits for it at once, and moves it on by itself, without the engine's thread."""

    def __init__(
        self, strategy: PsStrategy, session: Workers, entries: Sequence[Entry], op: Reduction, *, waits: bool
    ) -> None:
        self._strategy, self._session, self._op, self._waits = strategy, session, op, waits
        spaces = session.spaces
        self._entries = [
            entry if entry.outs is None else entry._replace(sink=Sink(entry.info, entry.outs, spaces))
            for entry in entries
        ]

    def start(self, priority: int = 0) -> list[Pending]:
        """Messages out and back for each shard, shared by small keys; as many as a large one has partitions."""
        if not self._waits:
            return self._strategy.start(self._entries, priority, self._op)
        try:
            return self._strategy.start_waited(self._entries, priority, self._op)
        except KeyboardInterrupt as error:  # answers may still come, into the caller's arrays
            self._session.engine.interrupted("pushpull", error)
            raise

    def wait(self, pending: Sequence[Pending]) -> None:
        """Wait for all keys; those of a call that is waited for at once end together."""
        try:
            for one in pending:
                self._session.wait(one, None, pending)
        except (StallError, ConfigError):
            if self._waits:
                self._strategy.leave(pending)
            raise
        except KeyboardInterrupt as error:
            if self._waits:
                self._session.engine.interrupted("pushpull", error)
            raise

    def release(self) -> None:
        """Forget the arrays."""
        self.valid, self._entries = False, []


class PsStrategy(Strategy):
    """A worker of a store whose values live with servers.

    service: a server's loop to run inside this worker, or None. handed: what that is handed over.
    """

    def __init__(self, session: Workers, service: Steps[None] | None = None, handed: Loopback | None = None) -> None:
        self._session = session
        members = self._members = session.members
        self._servers = members.owners
        check_owners(len(self._servers), "servers")
        self._labels = [f"server {i} (rank {rank} on {members.hosts[rank]})" for i, rank in enumerate(self._servers)]
        self._keys: dict[int, ClientKey] = {}
        self._choices = Choices()
        self._first_values: dict[Key, HostArray] = {}  # at worker 0, of keys that are being agreed on
        self._loads = [0] * len(self._servers)
        self._whole = False
        self._local = session.links
        own = None if service is None else self._servers.index(session.transport.rank)
        self._client = Client(session.transport if self._local is None else self._local, self._servers, own, handed)
        self._rows = RowClient(session, self._client, self._labels)
        self._engine = session.engine
        self._device = self._device_calls()
        self._engine.serves = self._local is not None and service is not None
        session.start(KeyEvents(self._reserve, self._begin, self._broken, self._pushes))
        self._service = self._engine.serve(service, "server") if service is not None else None
        self._rank, self.synchronous = session.rank, session.synchronous
        session.before_barrier.append(lambda: self._flush("barrier"))

    def _device_calls(self) -> DeviceCalls | None:
        """For keys in device memory, where there can be some."""
        space, path = self._session.spaces.device, self._members.device_path
        if not isinstance(space, DeviceSpace) or path == "host":
            return None
        segment = None if self._local is None else self._local.segment
        return DeviceCalls(self._client, space, segment, direct=path == "mpi", lost=self._engine.fail)

    # --- keys as they are agreed on

    def _reserve(self, info: KeyInfo) -> Any:
        """At worker 0: where the key lives, balanced by bytes; the rows of row-sparse keys are with all servers."""
        if info.sparse:
            return None
        placement = place(
            self._members, info, whole=self._whole, load_bytes=self._loads, wire=compression.wire_of(info)
        )
        add_load(self._loads, placement, info.dtype.itemsize)
        return placement.announced()

    def _begin(self, info: KeyInfo, reserved: Any) -> None:
        """Note where the key lives; worker 0 sends its value there."""
        if info.sparse:
            self._rows.begin(info)
            return
        placement = as_announced(self._members, info, reserved, compression.wire_of(info))
        key = self._keys[info.id] = ClientKey(
            info, placement, choice=self._choice(info), space=self._session.spaces.of(info)
        )
        if self._rank == 0:
            self._send_value(key, self._first_values.pop(info.key))

    def _choice(self, info: KeyInfo) -> CodecChoice | None:
        """Whether the values of a key travel encoded, where they can and need not. Those of a GPU always do."""
        measures = compression.of_text(info.codec).chosen and info.n_elems > 0 and info.space == HOST
        return self._choices.of(compression.of_text(info.codec).push.name) if measures else None

    def _broken(self, info: KeyInfo) -> None:
        """A key that `init` returned for already turned out to differ between workers: forget it."""
        self._keys.pop(info.id, None)
        self._rows.forget(info)

    def _pushes(self) -> dict[int, int]:
        """How often this worker has pushed each key."""
        return {**{key_id: key.pushed for key_id, key in self._keys.items()}, **self._rows.pushes()}

    # --- messages

    def _send(self, server: int, header: wire.Header, payload: HostArray | bytes | None = None) -> None:
        with self._engine.lock:
            self._client.send(server, [(header, payload)])

    def _all_sent(self) -> bool:
        flushed = self._local is None or self._local.flushed
        return self._client.sent() and not self._client.unsent and flushed

    def _ask(self, kind: int, payloads: Sequence[bytes | None], call: str) -> list[bytes]:
        """Send each server a request and return their answers, whatever their length. Blocks."""
        self._wait_for_line()
        wait_for_tags(self._session, self._client, len(payloads))
        answers = [
            self._engine.start(self._client.answer(server, wire.Header(kind), payload), call)
            for server, payload in enumerate(payloads)
        ]
        for server, running in enumerate(answers):
            self._session.wait_for(running, call, (self._labels[server],))
        return [running.result or b"" for running in answers]

    def _wait_for_line(self) -> None:
        """Until all calls have been sent: those with arrays on a GPU may wait for copies."""
        device = self._device
        if device is not None and device.waiting:
            self._session.wait_for(Predicate(lambda: not device.waiting), "wait for earlier pushes and pulls")

    # --- keys

    def init(self, values: Sequence[NewKey]) -> None:
        """Agree; worker 0 sends the values to their servers."""
        if self._rank == 0:
            spaces = self._session.spaces
            for new in values:
                if not isinstance(new.value, RowSparse):
                    value = new.value if new.space == HOST else spaces.by_name(new.space).to_host(new.value)
                    self._first_values[new.key] = value
        self._rows.propose(values)
        _, error = self._session.agree_on_keys(values)
        for new in values:
            self._first_values.pop(new.key, None)
        self._rows.proposed(values)
        if error is not None:
            raise error

    def _send_value(self, key: ClientKey, value: HostArray) -> None:
        for server, header, payload in key.first_values(value):
            self._send(server, header, payload)

    # --- data

    def _count_push(self, info: KeyInfo) -> Under:
        """Count a push, and send changed attributes ahead of it; what it is made under."""
        under = self._under(info)
        self._keys[info.id].pushed += 1
        self._session.activity.note(f"push of key {shown(info.key)}")
        return under

    def _under(self, info: KeyInfo) -> Under:
        """What a push is made under; changed attributes are sent."""
        slot = self._session.slot_of(info)
        if not self.synchronous and self._session.optimizer_of(info) is None:
            raise MpikvError(
                f"push of key {shown(info.key)}: an asynchronous store needs set_optimizer before the first push"
            )
        under, attributes = self._session.under(info)
        if attributes is not None:
            text = json.dumps([slot, attributes]).encode()
            for server in range(len(self._servers)):
                self._send(server, wire.Header(wire.ATTRIBUTES, attributes_id=under.number), text)
        return under

    def push_rows(self, info: KeyInfo, total: RowSparse, priority: int) -> None:
        """One message to each server that has rows of the key."""
        self._rows.push(info, total, self._under(info), priority)

    def pull_rows(self, info: KeyInfo, ids: Ids, priority: int, call: str) -> tuple[HostArray, list[Pending]]:
        """One message to each server that has some of the rows, and its answer."""
        return self._rows.pull(info, ids, priority, call)

    def changed_rows(self, info: KeyInfo, priority: int) -> tuple[list[Pending], Callable[[], RowSparse]]:
        """One message to each owner, and its answer."""
        return self._rows.changed(info, priority)

    def _items(self, entries: Sequence[Entry], op: Reduction = SUM) -> list[Item]:
        """The keys of a call, each push counted; room for all of it is waited for."""
        items = []
        for info, total, sink, _ in entries:
            key, under = self._keys[info.id], NOTHING if total is None else self._count_push(info)
            pushed = None if total is None else scaled(self._session.spaces.of(info), total, under.ratio)
            item = Item(key, pushed, sink, key.routes, key.pushed, under.number, op, self._plain(key, op))
            items.append(item if key.choice is None or item.pushes_plain else self._chosen(item, key.choice))
        wait_for_tags(self._session, self._client, *self._client.tags_needed(items))
        return items

    def _chosen(self, item: Item, choice: CodecChoice) -> Item:
        """Encoded or as it is, whichever has been faster on this worker."""
        with self._engine.lock:
            if item.total is not None:
                item = item._replace(total=item.key.begin(item.total, self._engine.clock.now_s()))
            return item._replace(plain=wire.PLAIN_PUSH | wire.PLAIN_ANSWER) if choice.plain else item

    def _plain(self, key: ClientKey, op: Reduction) -> int:
        """What of a call travels as it is: sums alone are compressed, and not while the session says so."""
        if self._session.compressions.suspended or not op.adds:
            return wire.PLAIN_PUSH | wire.PLAIN_ANSWER
        return wire.PLAIN_ANSWER if key.plain else 0

    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        """Straight from the caller's own arrays where they are lent."""
        if len(entries) * len(self._servers) > self._client.payload_tags.count:  # hardly ever
            self._client.check_call([self._keys[entry.info.id] for entry in entries])
        lent = all(entry.outs is not None for entry in entries)
        return PsCall(self, self._session, entries, op, waits=waits and lent)

    def start(self, entries: Sequence[Entry], priority: int, op: Reduction) -> list[Pending]:
        """Start a call that the engine moves on."""
        items = self._items(entries, op)
        if not items:
            return []
        pushes, pulls = items[0].total is not None, items[0].sink is not None
        kind = wire.PUSHPULL if pushes and pulls else wire.PUSH if pushes else wire.PULL
        call = CALLS[kind]
        # As `Engine.start` does, with a function less between the call and the transport.
        running = self._engine.take(Running(self._steps(kind, items, priority), call, started=True))
        return self._pending(running, [self._waiting(call, item.key) for item in items]) if pulls else []

    def _steps(self, kind: int, items: Sequence[Item], priority: int) -> Steps[None]:
        device = self._device
        calls = device if device is not None and device.concerns(items) else self._client
        steps = calls.exchange(kind, items, wire.clamped(priority))
        timed = [item.key for item in items if item.sink is not None and item.key.choice is not None]
        return self._timed(steps, timed) if timed else steps

    def _timed(self, steps: Steps[None], keys: Sequence[ClientKey]) -> Steps[None]:
        yield from steps
        for key in keys:
            key.end(self._engine.clock.now_s())

    def start_waited(self, entries: Sequence[Entry], priority: int, op: Reduction) -> list[Pending]:
        """Start a `pushpull` that whoever waits for it moves on."""
        alone = self._service is None and (self._device is None or not self._device.waiting)
        if len(entries) == 1 and alone and self._keys[entries[0].info.id].smallest:
            return self._start_small(entries[0], op)
        items = self._items(entries, op)
        exchange = Exchange(self._steps(wire.PUSHPULL, items, priority))
        with self._engine.lock:
            exchange.running.advance()
        return self._pending(exchange, [self._waiting("pushpull", item.key) for item in items])[:1]

    def _start_small(self, entry: Entry, op: Reduction) -> list[Pending]:
        """The shortest path there is: asks MPI for the answer before it looks after anything else."""
        if not self._client.reply_tags.left:
            wait_for_tags(self._session, self._client, 1)
        info, total, sink = entry[:3]
        assert sink is not None
        key, under = self._keys[info.id], self._count_push(info)
        total = scaled(self._session.spaces.host, total, under.ratio)
        item = Item(key, total, sink, key.routes, key.pushed, under.number, op, self._plain(key, op))
        value = sink.buffer()
        with self._engine.lock:
            answer, tag = self._client.ask_small(item, value)
            done = soon(answer)
        if not done:
            return [Pending(Exchange(self._end_small(answer, tag, sink, value)), self._waiting("pushpull", key))]
        self._client.reply_tags.give([tag])
        sink.deliver(value)
        return []

    def _end_small(self, answer: Operation, tag: int, sink: Target, value: HostArray) -> Steps[None]:
        yield answer
        self._client.reply_tags.give([tag])
        sink.deliver(value)

    def leave(self, pending: Sequence[Pending]) -> None:
        """Let the engine move a call on whose caller has given up."""
        for one in pending:
            request = one.request.request if isinstance(one.request, EndingTogether) else one.request
            if isinstance(request, Exchange):
                self._engine.start(request.steps(), "pushpull")

    def _pending(self, request: Operation, waitings: Sequence[Waiting]) -> list[Pending]:
        """One transfer for each key of a call, all of which end together."""
        if len(waitings) == 1:
            return [Pending(request, waitings[0])]
        together = EndingTogether(request, waitings, self._session.waits.check)
        return [Pending(together, waiting, waitings) for waiting in waitings]

    def _waiting(self, call: str, key: ClientKey) -> Waiting:
        owners = tuple(self._labels[route.owner] for route in key.routes)
        return Waiting(call, key.info.key, key.info.id, key.pushed if self.synchronous else None, owners)

    # --- optimizers

    def _flush(self, call: str) -> None:
        """Wait until every server has handled all that this worker sent; rounds may still lack other workers."""
        self._ask(wire.FLUSH, [None] * len(self._servers), call)

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        """Worker 0 sends it to the servers; keys that it needs whole are moved together first."""
        self._flush("set_optimizer")
        slot, key_ids, pickled = self._session.agree_on_optimizer(optimizer, keys)
        if slot == DEFAULT_SLOT:
            self._whole = not optimizer.elementwise
        if not optimizer.elementwise:
            self._gather_cut_keys(slot)
        self._tell_servers(slot, pickled, key_ids)

    def compare_updates(self, optimizer: Optimizer, keys: Sequence[Key]) -> None:
        """Worker 0 tells the servers that they apply nothing."""
        self._flush("set_optimizer")
        slot, key_ids = self._session.agree_on_own_updates(optimizer, keys)
        self._tell_servers(slot, cloudpickle.dumps(optimizer.attributes()), key_ids)

    def _tell_servers(self, slot: int, pickled: bytes, key_ids: list[int]) -> None:
        """Worker 0 sends them an optimizer, or its attributes; all workers wait until they have it. Collective."""

        def send() -> None:
            payload = cloudpickle.dumps((slot, cloudpickle.loads(pickled), key_ids))
            for answer in self._ask(wire.OPTIMIZER, [payload] * len(self._servers), "set_optimizer"):
                if answer[1:]:
                    raise ConfigError(answer[1:].decode())

        self._session.decide("set_optimizer in place", send)

    def _gather_cut_keys(self, slot: int) -> None:
        """Move keys that are cut into shards to one server each. Collective."""
        for info in self._session.in_order():
            if info.sparse:
                continue
            key = self._keys[info.id]
            if self._session.slot_of(info) != slot or len(key.routes) < 2:
                continue
            placement = on_server(info, info.id % len(self._servers), key.placement.part_elems)
            if self._rank == 0:
                spaces = self._session.spaces
                value: HostArray = spaces.host.empty(info.n_elems, info.dtype)
                self._pull_plain(key, [value])
                for route in key.routes:
                    self._send(route.owner, wire.Header(wire.REMOVE, info.id))
                key.move(placement)
                self._send_value(key, value)
            key.move(placement)

    def _pull_plain(self, key: ClientKey, outs: Sequence[HostArray]) -> None:
        """Wait for a key's value as it is. The codec of pulls, which might remember what it has lost, has no part."""
        sink = Sink(key.info, outs, self._session.spaces)
        item = Item(key, None, sink, key.routes, key.pushed, plain=wire.PLAIN_ANSWER)
        wait_for_tags(self._session, self._client, *self._client.tags_needed([item]))
        running = self._engine.start(self._steps(wire.PULL, [item], 0), "pull")
        self._session.wait(Pending(running, self._waiting("pull", key)))

    def _owned(self, server: int) -> list[tuple[KeyInfo, int, int]]:
        """What a server owns, in the pieces that it keeps states of."""
        owned: list[tuple[KeyInfo, int, int]] = []
        for key in self._keys.values():
            optimizer = self._session.optimizer_of(key.info)
            for route in key.routes:
                if route.owner == server:
                    cut = optimizer is None or optimizer.elementwise
                    pieces = route.parts if cut else ((route.begin, route.end),)
                    owned += [(key.info, begin, end) for begin, end in pieces]
        return [*owned, *self._rows.owned(server)]

    def save_states(self, write: Write) -> None:
        """Worker 0 asks every server."""
        self._settle(SAVE)

        def ask() -> None:
            write([records_from_bytes(answer) for answer in self._ask(wire.SAVE, [None] * len(self._servers), SAVE)])

        self._session.decide(SAVE, ask)

    def load_states(self, read: Read) -> Loaded:
        """Worker 0 gives each server its part."""
        self._settle(LOAD)

        def give() -> Loaded:
            file = read()
            forget = json.dumps([self._session.infos[key].id for key in restored(file)[0]]).encode()
            owned = [self._owned(server) for server in range(len(self._servers))]
            blobs = [wire.with_text(forget, records_to_bytes(distribute(file, shards))) for shards in owned]
            self._ask(wire.LOAD, blobs, LOAD)
            return restored(file)

        keys, configs = self._session.decide(LOAD, give)
        return keys, configs

    def codec_states(self, call: str) -> list[StateRecord]:
        """What was pushed is encoded when it is sent."""
        self._wait_for_line()
        return [
            record_of(key.info, begin, end, state)
            for key in self._keys.values()
            for begin, end, state in key.codec_states()
        ]

    def take_codec_states(self, parts: Sequence[StateRecord]) -> None:
        """Each key its own."""
        pieces: dict[Key, dict[tuple[int, int], Any]] = {}
        for part in parts:
            pieces.setdefault(part.key, {})[part.begin, part.end] = part.state
        self._wait_for_line()
        with self._engine.lock:
            for key in self._keys.values():
                key.take_codec_states(pieces.get(key.info.key, {}))

    def _settle(self, call: str) -> None:
        """Wait until everything that all workers pushed so far has been applied. Collective."""
        if self.synchronous:
            for key in tuple(self._keys.values()):
                self._pull_plain(key, [])
            self._rows.settle(call)
        else:
            self._flush(call)
            self._session.agree(call, None, call)

    # --- the end

    def close(self) -> None:
        """Wait until all workers close, then say goodbye to the servers."""
        self._flush("close")
        _, error = self._session.leave(matched=self.synchronous)
        for server in range(len(self._servers)):
            self._send(server, wire.Header(wire.BYE))
        self._session.wait_for(Predicate(self._all_sent), "close")
        if self._service is not None:
            self._session.wait_for(self._service, "close")
        if error is not None:
            raise error
        self._session.end()

    # --- memory of the host

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        """Memory that servers of this host read in place, else none. Each worker's own; all ask for the same."""
        self._session.agree("empty", [text, -1], "empty")
        return None if self._local is None else self._local.segment.take(n_bytes)

    def stats(self) -> dict[str, Any]:
        """What was encoded, and what was sent through memory.

        encoded_from_bytes, encoded_bytes: pushes before and after; missing where no key is compressed. compressed_keys:
        as of a store without servers.
        memory_messages, memory_bytes: to servers of this host. bytes_copied: into and out of memory, by this worker.
        held_bytes: its scratch memory there. shared_bytes: its arrays of `store.empty`, the values that it serves, and
        what arrays on a GPU are copied through.
        """
        keys = tuple(self._keys.values())
        encoded: dict[str, Any] = dict(encoded_bytes(key.encoded for key in keys))
        if chosen := {str(key.info.key): key.choice.stats(key.info.codec) for key in keys if key.choice is not None}:
            encoded["compressed_keys"] = chosen
        local = self._local
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
