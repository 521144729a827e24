"""Calls of keys with owners: what a worker sends them, and waits for.

A push is not acknowledged, since MPI loses no message. A pull names the version that it needs (synchronous) or none
(asynchronous), and the owner answers when that version exists. A pushpull is both in one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import REDUCTIONS, SUM, Reduction
from mpikv.collectives import adasum
from mpikv.common.checks import shown
from mpikv.engine.operation import Operation, Steps, Turns
from mpikv.engine.running import Running
from mpikv.errors import ConfigError, StallError, UnsupportedError
from mpikv.observe.stall import Waiting
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import NO_OPTIMIZER, PushLabel, scaled
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.base import Entry, PreparedCall, Sink
from mpikv.strategies.client_key import ClientKey
from mpikv.strategies.device_calls import DeviceCalls
from mpikv.strategies.exchange import BatchTransfer, Client, Exchange, Item, poll_briefly, wait_for_tags
from mpikv.strategies.sparse import push_label
from mpikv.transports import wire

CALLS = {wire.PUSH: "push", wire.PULL: "pull", wire.PUSHPULL: "pushpull"}


class OwnedCall(PreparedCall):
    """One call. waits: its caller waits at once, and runs the call's steps itself instead of the engine's thread."""

    def __init__(
        self, calls: OwnedCalls, session: Workers, entries: Sequence[Entry], op: Reduction, *, waits: bool
    ) -> None:
        self.calls, self._session, self.op, self._waits = calls, session, op, waits
        spaces = session.spaces
        self.entries = [
            entry if entry.outs is None else entry._replace(sink=Sink(entry.info, entry.outs, spaces))
            for entry in entries
        ]

    def start(self, priority: int = 0) -> list[Pending]:
        if not self._waits:
            return self.calls.start(self.entries, priority, self.op)
        try:
            return self.calls.start_waited(self.entries, priority, self.op)
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
                self.calls.run_by_engine(pending)
            raise
        except KeyboardInterrupt as error:
            if self._waits:
                self._session.engine.interrupted("pushpull", error)
            raise

    def release(self) -> None:
        self.valid, self.entries = False, []


class OwnedCalls:
    """Those of one worker. keys: by their numbers. labels: the owners' names. own: whether one of them is in it.

    device: of keys whose arrays are on a GPU, if there are any.
    """

    def __init__(
        self, session: Workers, client: Client, keys: Mapping[int, ClientKey], labels: Sequence[str], *, own: bool
    ) -> None:
        self._session, self._client, self._keys, self._labels, self._own = session, client, keys, labels, own
        self._engine, self._recorder, self._members = session.engine, session.recorder, session.members
        self._turns = Turns()  # of calls that wait for others
        self.device = self._device_calls()

    def _device_calls(self) -> DeviceCalls | None:
        space = self._session.spaces.device
        if not isinstance(space, DeviceSpace) or self._members.device_path == "none":
            return None
        return DeviceCalls(self._client, space, on_lost=self._engine.fail)

    def owners_of(self, info: KeyInfo) -> tuple[str, ...]:
        return tuple(self._labels[route.owner] for route in self._keys[info.id].routes)

    # --- items

    def _count_push(self, info: KeyInfo) -> PushLabel:
        """Count a push, and send changed attributes before it. Returns what it is made under."""
        under = push_label(self._session, info)
        self._keys[info.id].pushed += 1
        self._session.activity.note(f"push of key {shown(info.key)}")
        return under

    def _items(self, entries: Sequence[Entry], op: Reduction = SUM) -> list[Item]:
        """Make the items of a call's keys and count pushes. Blocks until there are tags for all messages."""
        items = []
        for info, total, sink, _ in entries:
            key, under = self._keys[info.id], NO_OPTIMIZER if total is None else self._count_push(info)
            pushed = None if total is None else scaled(self._session.spaces.of(info), total, under.ratio)
            flags = self._uncompressed_flags(key, op, pushes=total is not None)
            routes = key.routes if sink is None else key.answering
            items.append(Item(key, pushed, sink, routes, key.pushed, under.number, op, flags))
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
        if len(entries) * len(self._labels) > self._client.payload_tags.count:  # hardly ever
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
        running = self._engine.take(Running(self.steps(kind, items, priority), call, started=True))
        return self._pending(running, [self.waiting(call, item.key) for item in items]) if pulls else []

    def steps(self, kind: int, items: list[Item], priority: int) -> Steps[None]:
        device, whole = self.device, items[0].op.whole
        calls = device if device is not None and device.concerns(items) else self._client
        steps = calls.exchange(kind, items, wire.clamped(priority))
        if whole or self._turns.taken:
            steps = self._in_turn(steps, items if whole else [])
        return self._recorded(steps, items) if self._recorder.on else steps

    def _in_turn(self, steps: Steps[None], whole: list[Item]) -> Steps[None]:
        """Begin an exchange when all earlier calls have, since owners must get a worker's calls in their order.

        whole: its items, in a reduction of whole values. The workers combine these by themselves, side by side, since
        another worker may have them in another order, and all to the same bits, of which an owner takes the maximum.
        """
        with self._turns.take() as turn:
            totals = [self._engine.start(self._combined(item), "pushpull") for item in whole]
            for i, total in enumerate(totals):
                yield total
                whole[i] = whole[i]._replace(total=total.result, op=REDUCTIONS["max"])
            yield turn
        yield from steps  # which sends everything before it waits

    def _combined(self, item: Item) -> Steps[SpaceArray]:
        info, space = item.key.info, self._session.spaces.of(item.key.info)
        if isinstance(space, DeviceSpace):
            yield space.written(item.total)
        tag = wire.key_tag(info.id, 3)
        return (yield from adasum.of_space(self._session.group, space, item.total, tag, changeable=False))

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
        alone = not self._own and (self.device is None or not self.device.waiting)
        if len(entries) == 1 and alone and self._keys[entries[0].info.id].can_ask_small:
            return self._start_small(entries[0], op)
        items = self._items(entries, op)
        if not items:
            return []
        exchange = Exchange(self.steps(wire.PUSHPULL, items, priority))
        with self._engine.lock:
            exchange.running.advance()
        call = "pushpull" if not op.whole else f"pushpull(op={op.name!r})"
        return self._pending(exchange, [self.waiting(call, item.key) for item in items])[:1]

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
            return [Pending(Exchange(end), self.waiting("pushpull", key))]
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

    def waiting(self, call: str, key: ClientKey) -> Waiting:
        round_ = key.pushed if self._session.synchronous else None
        return Waiting(call, key.info.key, key.info.id, round_, self.owners_of(key.info))
