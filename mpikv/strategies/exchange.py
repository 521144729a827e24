"""A worker's messages to servers and their answers.

Every shard of a key travels on the path that was fixed when the key was agreed on: a small one behind its header, those
of one call for one server in one message; a large one in partitions, straight from the array that it is in or that the
key's codec has made of it, which the server fetches one after the other. Answers come in the same partitions, straight
into the array that is asked for; those to the small keys of one message come in one message.

Servers on the same host are reached through memory (transports/memory.py), with the same messages.

Cost: one copy of a small shard, none of a large one. A tag for each large shard, and for each answer, until it is done.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.collectives.stages import Receiver, Sender, Stage, drive
from mpikv.engine.operation import Operation, Predicate, Steps
from mpikv.engine.running import Running
from mpikv.errors import ConfigError, UnsupportedError
from mpikv.observe.stall import Waiting
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.client_key import INLINE_BYTES, ClientKey, PieceMessages, Route, Value
from mpikv.transports import wire
from mpikv.transports.base import Arrival, Transport
from mpikv.transports.loopback import Loopback

POLLS = 10  # then the core is given to whom we wait for, if it has none
SOON_S = 150e-6  # an answer takes some tens of microseconds, and waiting for the engine begins with as many
FEW = 16  # messages that may wait to be forgotten, since asking whether one has left is not free
MESSAGE_BYTES = 1 << 22  # small keys of one call share messages of about this size at most
# Partitions of one shard, in each direction: far more than a server takes at a time (its WINDOW), so that it never
# waits for a worker, and few enough that MPI finds the one that it looks for at once.
PARTS_UNDER_WAY = 64


def soon(request: Operation) -> bool:
    """Look whether it is done, for about as long as an answer takes when nobody is late."""
    for _ in range(POLLS):
        if request.test():
            return True
    deadline = time.perf_counter() + SOON_S
    while time.perf_counter() < deadline:
        os.sched_yield()
        if request.test():
            return True
    return False


class Target(Protocol):
    """Where the answer for a key goes; a `Sink`, or what stands between it and the messages."""

    def buffer(self) -> SpaceArray | PieceMessages:
        """Return memory for the flat value, which messages are received into."""
        ...

    def deliver(self, value: SpaceArray | PieceMessages) -> None:
        """Bring the value, which is all in the buffer, to where it goes."""
        ...


class Item(NamedTuple):
    """One key of a call, or the shards of it that travel alike.

    total: what is pushed, flat: host memory, or memory that MPI sends from; sink: where the answer goes; routes: the
    shards that this is about; round: how often the key has been pushed, with this push; attributes: their number.
    op: what the totals of all workers become. plain: what travels as it is, whatever the key's codec, as the header
    says it.
    """

    key: ClientKey
    total: SpaceArray | None
    sink: Target | None
    routes: Sequence[Route]
    round: int
    attributes: int = 0
    op: Reduction = SUM
    plain: int = wire.PLAIN_ANSWER

    @property
    def pushes_plain(self) -> bool:
        """Whether its push travels as it is, though others of the key may not."""
        return bool(self.plain & wire.PLAIN_PUSH)

    @property
    def answered_plain(self) -> bool:
        """Whether the answer comes as it is."""
        return bool(self.plain & wire.PLAIN_ANSWER)

    def pushed(self, begin: int, end: int) -> HostArray | None:
        """What travels of elements [begin, end); None where nothing is pushed."""
        if self.total is None:
            return None
        return self.key.encode(self.total, begin, end, plain=self.pushes_plain)


class Tags:
    """Numbers that nothing outstanding uses."""

    def __init__(self, first: int, count: int) -> None:
        self._free = deque(range(first, first + count))
        self.count = count

    @property
    def left(self) -> int:
        """How many are free."""
        return len(self._free)

    def allow(self, number: int) -> bool:
        """Whether a call may have so many: one that needs more than there are gets them while it is the only one."""
        return number <= self.left or self.left == self.count

    def take(self) -> int:
        """The one that was free for longest."""
        return self._free.popleft()

    def give(self, tags: Sequence[int]) -> None:
        """They are free again."""
        self._free.extend(tags)


def check_owners(number: int, what: str) -> None:
    """Raise ConfigError where a worker has too few tags to ask all owners at a time, or to cut a key over all."""
    if number >= wire.PAYLOAD_TAGS:
        raise ConfigError(f"{number} {what}: a worker can ask at most {wire.PAYLOAD_TAGS - 1} at a time")


class Exchange:
    """A call under way: a request that moves itself on, for whoever waits for it."""

    def __init__(self, steps: Steps[None]) -> None:
        self.running = Running(steps, "")

    def test(self) -> bool:
        """Whether it is done. Under the engine's lock."""
        self.running.advance()
        return self.running.test()

    def steps(self) -> Steps[None]:
        """For an engine, where nobody waits any more."""
        yield self


def wait_for_tags(session: Workers, client: Client, replies: int, payloads: int = 0) -> None:
    """Wait until a call may take so many: a program that never waits for its requests does so after thousands."""
    if not client.allows(replies, payloads):
        session.wait_for(Predicate(lambda: client.allows(replies, payloads)), "wait for earlier pushes and pulls")


class EndingTogether:
    """The one transfer of several keys. A wait for one of them looks after all of them.

    check: raises when the wait for a key can never end.
    """

    def __init__(self, request: Operation, waitings: Sequence[Waiting], check: Callable[[Waiting], None]) -> None:
        self.request = request
        self._waitings = waitings
        self._check = check
        self._tests = 0

    def test(self) -> bool:
        """Whether it is done."""
        if self.request.test():
            return True
        self._tests += 1
        if self._tests % 64 == 0:  # there may be hundreds of keys, and nothing of this is urgent
            for waiting in self._waitings:
                self._check(waiting)
        return False


class Client:
    """One worker's end of the messages. Everything here is called under the engine's lock."""

    def __init__(
        self,
        transport: Transport,
        servers: Sequence[int],
        own: int | None = None,
        handed: Loopback | None = None,
    ) -> None:
        """own: which of the servers is in this process, if one is. handed: for messages to it of device arrays."""
        self.transport, self.own = transport, own
        self._handed = Loopback() if handed is None else handed
        self.reply_tags = Tags(wire.TAG_REPLY, wire.REPLY_TAGS)
        self.payload_tags = Tags(1, wire.PAYLOAD_TAGS - 1)  # 0 says that there is none
        self._servers = tuple(servers)
        self._sends: deque[Operation] = deque()
        self.unsent = 0  # pushes whose payload has not left
        # An answer through memory comes after the partition that it replaces has been read.
        local = transport.local
        self.through_memory = [local is not None and local.reaches(rank) for rank in self._servers]

    def send(self, server: int, requests: Sequence[tuple[wire.Header, wire.Payload]]) -> None:
        """Send one message."""
        if len(self._sends) > FEW:
            self.sent()
        message = wire.request(*requests[0]) if len(requests) == 1 else wire.requests(requests)
        self._sends.append(self.transport.isend(message, self._servers[server], wire.TAG_REQUEST))

    def sent(self) -> bool:
        """Whether every message has left."""
        while self._sends and self._sends[0].test():
            self._sends.popleft()
        return not self._sends

    def answer(self, server: int, header: wire.Header, payload: wire.Payload) -> Steps[bytes]:
        """Ask one server something, and take its answer of whatever length."""
        tag = self.reply_tags.take()
        self.send(server, [(header._replace(reply_tag=tag), payload)])
        arrival = Arrival(self.transport, tag)
        yield arrival
        data: HostArray = np.empty(arrival.incoming.n_bytes, np.uint8)
        yield arrival.incoming.receive(data)
        self.reply_tags.give([tag])
        return data.tobytes()

    def ask_small(self, item: Item, value: HostArray) -> tuple[Operation, int]:
        """Push and pull one key that is one small shard, into `value`; the answer to wait for, and the tag to give."""
        (route,) = item.key.routes
        tag = self.reply_tags.take()
        # The receive is there before the question leaves, so that the answer needs no copy on its way.
        answer = self.irecv(value, route.owner, tag)
        header = wire.Header(
            wire.PUSHPULL, item.key.info.id, tag, item.attributes, item.round, op=item.op.code, plain=item.plain
        )
        self.send(route.owner, [(header, item.pushed(route.begin, route.end))])
        return answer, tag

    def allows(self, replies: int, payloads: int) -> bool:
        """Whether a call that needs so many tags may begin."""
        return self.reply_tags.allow(replies) and self.payload_tags.allow(payloads)

    def check_call(self, keys: Sequence[ClientKey]) -> None:
        """Raise UnsupportedError for a call with more large shards than there are tags, which could never be sent."""
        large, most = sum(not route.inline for key in keys for route in key.routes), self.payload_tags.count
        if large > most:
            raise UnsupportedError(
                f"a call with {large} shards of more than {INLINE_BYTES >> 10} KiB: at most {most} can be on their way "
                "at a time; give fewer keys in one call"
            )

    @staticmethod
    def tags_needed(items: Sequence[Item]) -> tuple[int, int]:
        """Reply tags and payload tags that a call takes at most."""
        routes = [(item, route) for item in items for route in item.routes]
        replies = sum(item.sink is not None for item, _ in routes)
        return replies, sum(item.total is not None and not route.inline for item, route in routes)

    def exchange(self, kind: int, items: Sequence[Item], priority: int) -> Steps[None]:
        """Push, pull or both, of all items; ends when every answer is there and every array free again."""
        self.unsent += kind == wire.PUSH
        values = [
            None if item.sink is None else item.key.value(item.sink.buffer(), plain=item.answered_plain)
            for item in items
        ]
        many = any(len(route.parts) > PARTS_UNDER_WAY for item in items for route in item.routes)
        transfer = _Transfer(self, kind, priority, many=many)
        transfer.send_small(items, values)
        for item, value in zip(items, values, strict=True):
            for route in item.routes:
                if not route.inline:
                    transfer.send_large(item, value, route)
        yield from transfer.end()
        for item, value in zip(items, values, strict=True):
            if item.sink is not None and value is not None:
                item.sink.deliver(value.complete())
        self.unsent -= kind == wire.PUSH

    def isend(self, data: HostArray, server: int, tag: int) -> Operation:
        """Start sending to a server."""
        if server == self.own and not isinstance(data, np.ndarray):
            return self._handed.send(data, tag)
        return self.transport.isend(data, self._servers[server], tag)

    def irecv(self, data: HostArray, server: int, tag: int) -> Operation:
        """Start receiving from a server."""
        if server == self.own and not isinstance(data, np.ndarray):
            return self._handed.receive(data, tag)
        return self.transport.irecv(data, self._servers[server], tag)


class _Transfer:
    """The messages of one call.

    many: some shard has more partitions than are to be under way at once. Then those of each shard wait for their turn
    by themselves: a server may take those of one shard only when other workers have pushed another one.
    """

    def __init__(self, client: Client, kind: int, priority: int, *, many: bool) -> None:
        self._client = client
        self._kind = kind
        self._priority = priority
        self._receives: list[Operation] = []
        self._sends: list[Operation] = []
        self._reply_tags: list[int] = []
        self._payload_tags: list[int] = []
        self._joint: list[tuple[HostArray, list[HostArray]]] = []  # an answer to several keys, and their arrays
        self._late: list[tuple[Operation, HostArray, int, int]] = []
        self._many = many
        self._stages: list[Stage] = []

    def _header(self, item: Item, reply_tag: int, payload_tag: int = 0) -> wire.Header:
        return wire.Header(
            self._kind,
            item.key.info.id,
            reply_tag,
            item.attributes,
            item.round,
            payload_tag,
            self._priority,
            item.op.code,
            item.plain,
        )

    def send_small(self, items: Sequence[Item], values: Sequence[Value | None]) -> None:
        """The shards that travel behind their headers, in as few messages as there are servers."""
        by_server: dict[int, list[_Small]] = {}
        for item, value in zip(items, values, strict=True):
            for route in item.routes:
                if route.inline:
                    by_server.setdefault(route.owner, []).append(_Small(item, value, route))
        for server, shards in by_server.items():
            for some in _messages(shards):
                tag = self._expect(
                    server,
                    [value.piece(route.begin, route.end) for _, value, route in some if value is not None],
                )
                self._client.send(
                    server,
                    [(self._header(item, tag), item.pushed(route.begin, route.end)) for item, _, route in some],
                )

    def _expect(self, server: int, parts: list[HostArray]) -> int:
        """Post the receive of an answer, before the question leaves, so that it needs no copy on its way."""
        if not parts:
            return 0
        tag = self._client.reply_tags.take()
        self._reply_tags.append(tag)
        data = parts[0]
        if len(parts) > 1:
            data = np.empty(sum(part.nbytes for part in parts), np.uint8)
            self._joint.append((data, parts))
        self._receives.append(self._client.irecv(data, server, tag))
        return tag

    def send_large(self, item: Item, value: Value | None, route: Route) -> None:
        """A header, and the partitions, which wait to be fetched."""
        client, total, server = self._client, item.total, route.owner
        reply_tag = payload_tag = 0
        if value is not None:
            reply_tag = client.reply_tags.take()
            self._reply_tags.append(reply_tag)
        if total is not None:
            payload_tag = client.payload_tags.take()
            self._payload_tags.append(payload_tag)
        client.send(server, [(self._header(item, reply_tag, payload_tag), None)])
        pieces = [piece for part in route.parts if (piece := item.pushed(*part)) is not None]
        answers = [] if value is None else [value.piece(begin, end) for begin, end in route.parts]
        one_array = False
        if total is not None and value is not None and not client.through_memory[server]:
            as_it_is = item.answered_plain and (item.key.sends_as_it_is or item.pushes_plain)
            one_array = as_it_is and _overlap(total, value.array)
        if self._many:
            outgoing = [(server, piece) for piece in pieces]
            tag = wire.TAG_PAYLOAD + payload_tag
            sender = Sender(client, outgoing, tag, PARTS_UNDER_WAY, lambda: len(route.parts))
            targets = [(server, answer) for answer in answers]
            may_post = (lambda: sender.left) if one_array else None
            self._stages += [sender, Receiver(client, targets, reply_tag, PARTS_UNDER_WAY, may_post=may_post)]
            return
        for i in range(len(route.parts)):
            if pieces:
                request = client.isend(pieces[i], server, wire.TAG_PAYLOAD + payload_tag)
                self._sends.append(request)
                if one_array:
                    # The answer goes where the partition is sent from: MPI must be done with reading it first.
                    self._late.append((request, answers[i], server, reply_tag))
            if answers and not one_array:
                self._receives.append(client.irecv(answers[i], server, reply_tag))

    def end(self) -> Steps[None]:
        """Wait for everything."""
        yield from drive(*self._stages)
        for request, part, server, tag in self._late:
            yield request
            self._receives.append(self._client.irecv(part, server, tag))
        yield from self._receives
        for data, parts in self._joint:
            at = 0
            for part in parts:
                part.view(np.uint8)[:] = data[at : at + part.nbytes]
                at += part.nbytes
        yield from self._sends
        self._client.reply_tags.give(self._reply_tags)
        self._client.payload_tags.give(self._payload_tags)


def _overlap(total: SpaceArray, value: SpaceArray | PieceMessages) -> bool:
    """Whether an answer would overwrite what is sent. Device memory of a call is one array or two that are apart."""
    on_host = isinstance(total, np.ndarray) and isinstance(value, np.ndarray)
    return total is value or (on_host and np.may_share_memory(total, value))


class _Small(NamedTuple):
    """A shard that travels behind its header."""

    item: Item
    value: Value | None
    route: Route


def _messages(shards: Sequence[_Small]) -> list[list[_Small]]:
    """The shards for one server, by messages of about MESSAGE_BYTES."""
    messages: list[list[_Small]] = [[]]
    n_bytes = 0
    for one in shards:
        if n_bytes > MESSAGE_BYTES:
            messages.append([])
            n_bytes = 0
        messages[-1].append(one)
        n_bytes += wire.HEADER_BYTES + one.route.n_bytes
    return messages
