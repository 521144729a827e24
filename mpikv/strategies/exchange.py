"""A worker's messages to servers and their answers.

How a shard is sent is fixed when the workers agree on the key. A small shard is sent behind its header; small shards
of a call for one server share messages, each of which is short for MPI, and so do their answers. A large shard is sent
in pieces, directly from the array that it is in or from the codec's output, and the server fetches one piece after
another. Answers have the same pieces and are received directly into the caller's array.

Servers on the same host get the same messages through shared memory (transports/memory.py).

Cost: one copy of a small shard, none of a large one. One tag for each large shard and for each answer until it is done.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.collectives.stages import Receiver, Sender, Stage, drive
from mpikv.engine.operation import Operation, Predicate, Steps
from mpikv.engine.running import Running
from mpikv.errors import UnsupportedError
from mpikv.observe.stall import Waiting
from mpikv.placement.links import LINK_SEGMENT_BYTES
from mpikv.placement.owners import is_asked_for
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.client_key import INLINE_BYTES, AnswerBuffer, ClientKey, PieceMessages, Route
from mpikv.strategies.offered_pieces import OfferedPieces
from mpikv.transports import wire
from mpikv.transports.base import Arrival, Transport
from mpikv.transports.loopback import Loopback, OwnRank

POLLS = 10  # then the core is yielded, which the peer may need to answer
BRIEF_S = 150e-6  # an answer takes some tens of microseconds, and a wait by the engine costs as many to begin
MOST_KEPT_SENDS = 16  # sends are kept up to this number before they are tested, because a test takes time
# Pieces of one shard, in each direction: far more than a server fetches at a time (its WINDOW), so that it never waits
# for a worker, and few enough that MPI finds the matching message quickly.
PIECES_IN_FLIGHT = 64


def poll_briefly(request: Operation) -> bool:
    """Test a request for about as long as an answer usually takes. Returns whether it is done."""
    for _ in range(POLLS):
        if request.test():
            return True
    deadline = time.perf_counter() + BRIEF_S
    while time.perf_counter() < deadline:
        os.sched_yield()
        if request.test():
            return True
    return False


class Target(Protocol):
    """Where the answer for a key goes: a `Sink`, or memory from which the answer is copied to it later."""

    def buffer(self) -> SpaceArray | PieceMessages:
        """Memory for the flat value, into which messages are received."""

    def deliver(self, value: SpaceArray | PieceMessages) -> None:
        """Write the value, which is complete in the buffer, to where it goes."""


class InPlace(NamedTuple):
    """A target whose answer stays where it is received."""

    value: SpaceArray | PieceMessages

    def buffer(self) -> SpaceArray | PieceMessages:
        return self.value

    def deliver(self, value: object) -> None: ...


class Item(NamedTuple):
    """One key of a call, or those of its shards that are sent in the same manner.

    total: what is pushed, flat, in host memory or, within the process, on a GPU. round: how often the key has been
    pushed, this push included. attributes: their number. op: how the totals of all workers are combined. flags: of the
    header: whether the push and the answer are uncompressed, whatever the key's codec.
    """

    key: ClientKey
    total: SpaceArray | None
    sink: Target | None
    routes: Sequence[Route]
    round: int
    attributes: int = 0
    op: Reduction = SUM
    flags: int = wire.UNCOMPRESSED_ANSWER

    @property
    def kind(self) -> int:
        if self.total is None:
            return wire.PULL
        return wire.PUSH if self.sink is None else wire.PUSHPULL

    @property
    def pushes_uncompressed(self) -> bool:
        return bool(self.flags & wire.UNCOMPRESSED_PUSH)

    @property
    def answered_uncompressed(self) -> bool:
        return bool(self.flags & wire.UNCOMPRESSED_ANSWER)

    def answer_buffer(self) -> AnswerBuffer | None:
        """Make the buffer for the answer; None if nothing is pulled."""
        if self.sink is None:
            return None
        return AnswerBuffer(self.sink.buffer(), None if self.answered_uncompressed else self.key.returned)

    def pushed(self, begin: int, end: int) -> HostArray | None:
        """Elements [begin, end) as they are sent; None if nothing is pushed."""
        if self.total is None:
            return None
        return self.key.encode(self.total, begin, end, uncompressed=self.pushes_uncompressed)


class Tags:
    """A pool of message tags that no outstanding message uses."""

    def __init__(self, first: int, count: int) -> None:
        self._free = deque(range(first, first + count))
        self.count = count

    @property
    def left(self) -> int:
        return len(self._free)

    def allow(self, number: int) -> bool:
        """Whether a call may begin that takes `number` tags. A call that needs more than exist may begin alone."""
        return number <= self.left or self.left == self.count

    def take(self) -> int:
        return self._free.popleft()

    def give(self, tags: Sequence[int]) -> None:
        self._free.extend(tags)


def too_many(number: int, what: str) -> str:
    """Say that a worker has too few tags to ask all owners at once, or to cut a key over all of them; "": enough."""
    most = wire.PAYLOAD_TAGS - 1
    return f"{number} {what}: a worker can ask at most {most} at a time" if number > most else ""


class Exchange:
    """A call in progress, as a request whose `test` runs the call's steps. The engine need not run them."""

    def __init__(self, steps: Steps[None]) -> None:
        self.running = Running(steps, "pushpull", started=True)

    def test(self) -> bool:
        self.running.advance()
        return self.running.test()


def wait_for_tags(session: Workers, client: Client, replies: int, payloads: int = 0) -> None:
    """Wait until a call may take so many tags. Only programs with thousands of unfinished requests ever wait here."""
    if not client.allows(replies, payloads):
        session.wait_for(Predicate(lambda: client.allows(replies, payloads)), "wait for earlier pushes and pulls")


class BatchTransfer:
    """The one transfer of several keys of a call. check: raises when the wait for a key can never end."""

    def __init__(self, request: Operation, waitings: Sequence[Waiting], check: Callable[[Waiting], None]) -> None:
        self.request, self._waitings, self._check, self._tests = request, waitings, check, 0

    def test(self) -> bool:
        if self.request.test():
            return True
        self._tests += 1
        if self._tests % 64 == 0:  # there may be hundreds of keys, and the check is not urgent
            for waiting in self._waitings:
                self._check(waiting)
        return False


class Client:
    """Sends one worker's messages and receives answers. Everything here is called under the engine's lock."""

    def __init__(
        self,
        transport: Transport,
        servers: Sequence[int],
        own: int | None = None,
        loopback: Loopback | None = None,
    ) -> None:
        """own: the index of the server that is in this process, if any. loopback: passes device arrays to it."""
        self.transport, self.own = transport, own
        self._loopback = Loopback() if loopback is None else loopback
        self.reply_tags = Tags(wire.TAG_REPLY, wire.REPLY_TAGS)
        self.payload_tags = Tags(1, wire.PAYLOAD_TAGS - 1)  # in a header, 0 means no tag
        self._servers = tuple(servers)
        self._sends: deque[Operation] = deque()
        self._before: list[list[tuple[wire.Header, wire.Payload]]] = [[] for _ in self._servers]
        self.unsent = 0  # pushes whose pieces have not all been sent
        # Servers that share memory with this worker. They send an answer only after reading the piece it replaces.
        local = transport.local
        self.through_memory = [local is not None and local.reaches(rank) for rank in self._servers]
        self._offered = [OfferedPieces(partial(_isend, transport, rank)) for rank in self._servers]
        # What a rank copies to itself is no message.
        inner = transport.inner if isinstance(transport, OwnRank) else transport
        self._ends: list[Transport] = [transport if rank == transport.rank else inner for rank in self._servers]
        self._sends_to = [rank != transport.rank or self.through_memory[i] for i, rank in enumerate(self._servers)]

    def send_before(self, header: wire.Header, payload: wire.Payload) -> None:
        """Let a request without an answer be in the next message to each server, in front of what that is sent for."""
        for before in self._before:
            before.append((header, payload))

    def send(self, server: int, requests: Sequence[tuple[wire.Header, wire.Payload]]) -> None:
        if before := self._before[server]:
            requests, self._before[server] = [*before, *requests], []
        if len(self._sends) > MOST_KEPT_SENDS:
            self.all_sent()
        if len(requests) == 1:
            header, payload = requests[0]
            message = wire.request(header, payload)
            self.count(server, header.kind, header.key_id, message.nbytes)
        else:
            message = wire.requests(requests)
            if self._sends_to[server]:
                self.transport.ledger.ask_together(requests, message.nbytes)
        self._sends.append(self._ends[server].isend(message, self._servers[server], wire.TAG_REQUEST))

    def count(self, server: int, kind: int, key_id: int, n_bytes: int) -> None:
        """Count what this request to a server, or the answer to it, has beside what `send` counts."""
        if self._sends_to[server]:
            self.transport.ledger.by_request[kind, key_id] += n_bytes

    def all_sent(self) -> bool:
        while self._sends and self._sends[0].test():
            self._sends.popleft()
        return not self._sends

    def ask(self, server: int, header: wire.Header, payload: wire.Payload) -> Steps[bytes]:
        tag = self.reply_tags.take()
        self.send(server, [(header._replace(reply_tag=tag), payload)])
        arrival = Arrival(self.transport, tag)
        yield arrival
        data: HostArray = np.empty(arrival.incoming.n_bytes, np.uint8)
        yield arrival.incoming.receive(data)
        self.count(server, header.kind, header.key_id, data.nbytes)
        self.reply_tags.give([tag])
        return data.tobytes()

    def ask_small(self, item: Item, value: HostArray) -> tuple[Operation, int]:
        """Push and pull a key of one small shard, into `value`. Returns the answer's request and tag."""
        (route,) = item.key.routes
        tag = self.reply_tags.take()
        # The receive is posted before the request is sent, so that MPI need not buffer the answer.
        answer = self.irecv(value, route.owner, tag)
        header = wire.Header(
            wire.PUSHPULL, item.key.info.id, tag, item.attributes, item.round, op=item.op.code, flags=item.flags
        )
        self.send(route.owner, [(header, item.pushed(route.begin, route.end))])
        self.count(route.owner, wire.PUSHPULL, header.key_id, value.nbytes)
        return answer, tag

    def allows(self, replies: int, payloads: int) -> bool:
        """Whether a call that needs these numbers of tags may begin."""
        return self.reply_tags.allow(replies) and self.payload_tags.allow(payloads)

    def check_call(self, keys: Sequence[ClientKey]) -> None:
        """Raise UnsupportedError for a call with more large shards than there are tags: it could never be sent."""
        large, most = sum(not route.inline for key in keys for route in key.routes), self.payload_tags.count
        if large > most:
            raise UnsupportedError(
                f"a call with {large} shards of more than {INLINE_BYTES >> 10} KiB: at most {most} can be sent at a "
                "time; give fewer keys in one call"
            )

    @staticmethod
    def tags_needed(items: Sequence[Item]) -> tuple[int, int]:
        routes = [(item, route) for item in items for route in item.routes]
        replies = sum(1 if item.key.replicated else len(item.routes) for item in items if item.sink is not None)
        return replies, sum(item.total is not None and not route.inline for item, route in routes)

    def _of_owners(self, item: Item) -> list[Item]:
        """An item of a replicated key for all owners, of which only that in this process has to answer."""
        if not item.key.replicated or len(item.routes) == 1:
            return [item]
        own = [route for route in item.routes if route.owner == self.own]
        others = [route for route in item.routes if route.owner != self.own]
        total = item.total
        if isinstance(total, np.ndarray):
            uncompressed = item.key.sends_uncompressed or item.pushes_uncompressed
            # A copy, since the answer, which may be written to the array, waits for no other owner to have read it.
            plain = total if item.sink is None else total.copy()
            total = plain if uncompressed else item.key.encoded_once(total)
        found = [item._replace(total=total, routes=own)]
        if total is not None:
            found.append(item._replace(total=total, sink=None, routes=others))
        return found

    def exchange(self, kind: int, items: Sequence[Item], priority: int) -> Steps[None]:
        """Push, pull or both, for all items. Ends when all answers have been received and no array is in use."""
        self.unsent += kind == wire.PUSH
        items = [one for item in items for one in self._of_owners(item)]
        buffers = [item.answer_buffer() for item in items]
        windowed = any(len(route.pieces) > PIECES_IN_FLIGHT for item in items for route in item.routes)
        transfer = _Transfer(self, priority, windowed=windowed)
        transfer.send_small(items, buffers)
        for item, buffer in zip(items, buffers, strict=True):
            for route in item.routes:
                if not route.inline:
                    transfer.send_large(item, buffer, route)
        yield from transfer.end()
        for item, buffer in zip(items, buffers, strict=True):
            if item.sink is not None and buffer is not None:
                item.sink.deliver(buffer.complete())
        self.unsent -= kind == wire.PUSH

    def isend(self, data: HostArray, server: int, tag: int) -> Operation:
        if server == self.own and not isinstance(data, np.ndarray):
            return self._loopback.send(data, tag)
        if self.offers(data, server):
            return self._offered[server].add(data, tag)
        return self._ends[server].isend(data, self._servers[server], tag)

    def offers(self, data: HostArray, server: int) -> bool:
        """Whether a server has to ask for a piece before it is sent."""
        return self._sends_to[server] and not self.through_memory[server] and is_asked_for(data.nbytes)

    def asked_for(self, rank: int, message: dict[str, Any]) -> None:
        server = self._servers.index(rank)
        self._offered[server].send(message["tag"], message["count"])
        if self.own is None:  # else the server's rank, which is a worker, counts what it sends
            self.count(server, 0, 0, wire.control(message).nbytes)

    def send_all_offered(self) -> None:
        """Send as if servers had asked for all, where there are none."""
        for offered in self._offered:
            offered.send_all()

    def irecv(self, data: HostArray, server: int, tag: int) -> Operation:
        if server == self.own and not isinstance(data, np.ndarray):
            return self._loopback.receive(data, tag)
        return self.transport.irecv(data, self._servers[server], tag)


def _isend(transport: Transport, rank: int, data: HostArray, tag: int) -> Operation:
    return transport.isend(data, rank, tag)


class _Transfer:
    """The messages of one call.

    windowed: whether some shard has more pieces than PIECES_IN_FLIGHT. If so, each shard has a window of its own,
    because a server may fetch the pieces of one shard only after other workers have pushed another shard.
    """

    def __init__(self, client: Client, priority: int, *, windowed: bool) -> None:
        self._client, self._priority, self._windowed = client, priority, windowed
        self._receives: list[Operation] = []
        self._sends: list[Operation] = []
        self._reply_tags: list[int] = []
        self._payload_tags: list[int] = []
        self._joint_answers: list[tuple[HostArray, list[HostArray]]] = []  # of several shards: buffer, arrays
        # Receives to post later: the send to wait for, array, server, tag.
        self._delayed: list[tuple[Operation, HostArray, int, int]] = []
        self._stages: list[Stage] = []

    def _header(self, item: Item, reply_tag: int, payload_tag: int = 0) -> wire.Header:
        of_item = item.key.info.id, reply_tag, item.attributes, item.round
        return wire.Header(item.kind, *of_item, payload_tag, self._priority, item.op.code, item.flags)

    def send_small(self, items: Sequence[Item], buffers: Sequence[AnswerBuffer | None]) -> None:
        """Send the shards that are sent behind their headers, by as few messages to each server as possible."""
        by_server: dict[int, list[_Small]] = {}
        for item, buffer in zip(items, buffers, strict=True):
            for route in item.routes:
                if route.inline:
                    by_server.setdefault(route.owner, []).append(_Small(item, buffer, route))
        for server, shards in by_server.items():
            for together in _messages(shards):
                answers = [
                    (item, buffer.memory_for(route.begin, route.end))
                    for item, buffer, route in together
                    if buffer is not None
                ]
                tag = self._post_receive(server, answers)
                self._client.send(
                    server,
                    [(self._header(item, tag), item.pushed(route.begin, route.end)) for item, _, route in together],
                )

    def _post_receive(self, server: int, answers: list[tuple[Item, HostArray]]) -> int:
        """Post an answer's receive, before the request is sent, so that MPI need not buffer it. Returns the tag."""
        if not answers:
            return 0
        tag = self._client.reply_tags.take()
        self._reply_tags.append(tag)
        for item, array in answers:
            self._client.count(server, item.kind, item.key.info.id, array.nbytes)
        arrays = [array for _, array in answers]
        data = arrays[0]
        if len(arrays) > 1:
            data = np.empty(sum(array.nbytes for array in arrays), np.uint8)
            self._joint_answers.append((data, arrays))
        self._receives.append(self._client.irecv(data, server, tag))
        return tag

    def send_large(self, item: Item, buffer: AnswerBuffer | None, route: Route) -> None:
        """Send a header, and offer the pieces, which the server fetches when it is ready."""
        client, total, server = self._client, item.total, route.owner
        reply_tag = payload_tag = 0
        if buffer is not None:
            reply_tag = client.reply_tags.take()
            self._reply_tags.append(reply_tag)
        if total is not None:
            payload_tag = client.payload_tags.take()
            self._payload_tags.append(payload_tag)
        client.send(server, [(self._header(item, reply_tag, payload_tag), None)])
        pieces = [data for piece in route.pieces if (data := item.pushed(*piece)) is not None]
        answers = [] if buffer is None else [buffer.memory_for(begin, end) for begin, end in route.pieces]
        if not item.flags & wire.LOOPBACK_PUSH:
            n_bytes = sum(one.nbytes for one in [*pieces, *answers])
            client.count(server, item.kind, item.key.info.id, n_bytes)
        one_array = False
        if total is not None and buffer is not None and not client.through_memory[server]:
            both_uncompressed = item.answered_uncompressed and (item.key.sends_uncompressed or item.pushes_uncompressed)
            one_array = both_uncompressed and _overlap(total, buffer.array)
        if self._windowed:
            outgoing = [(server, piece) for piece in pieces]
            tag = wire.TAG_PAYLOAD + payload_tag
            window = len(outgoing) if outgoing and client.offers(outgoing[0][1], server) else PIECES_IN_FLIGHT
            sender = Sender(client, outgoing, tag, window, lambda: len(route.pieces))
            targets = [(server, answer) for answer in answers]
            may_post = (lambda: sender.left) if one_array else None
            self._stages += [sender, Receiver(client, targets, reply_tag, PIECES_IN_FLIGHT, may_post=may_post)]
            return
        for i in range(len(route.pieces)):
            if pieces:
                request = client.isend(pieces[i], server, wire.TAG_PAYLOAD + payload_tag)
                self._sends.append(request)
                if one_array:
                    # The answer overwrites the array that the piece is sent from: MPI must have read that first.
                    self._delayed.append((request, answers[i], server, reply_tag))
            if answers and not one_array:
                self._receives.append(client.irecv(answers[i], server, reply_tag))

    def end(self) -> Steps[None]:
        yield from drive(*self._stages)
        for request, array, server, tag in self._delayed:
            yield request
            self._receives.append(self._client.irecv(array, server, tag))
        yield from self._receives
        yield from self._sends
        for data, arrays in self._joint_answers:
            at = 0
            for array in arrays:
                array.view(np.uint8)[:] = data[at : at + array.nbytes]
                at += array.nbytes
        self._client.reply_tags.give(self._reply_tags)
        self._client.payload_tags.give(self._payload_tags)


def _overlap(total: SpaceArray, value: SpaceArray | PieceMessages) -> bool:
    """Whether an answer would overwrite what is sent. Two device arrays of a call never overlap in part."""
    on_host = isinstance(total, np.ndarray) and isinstance(value, np.ndarray)
    return total is value or (on_host and np.may_share_memory(total, value))


class _Small(NamedTuple):
    """A shard that is sent behind its header."""

    item: Item
    buffer: AnswerBuffer | None
    route: Route


def _messages(shards: Sequence[_Small]) -> list[list[_Small]]:
    """Each is short for MPI, which sends it at once; one after another, so that owners add while others are sent."""
    messages: list[list[_Small]] = [[]]
    n_bytes = 0
    for one in shards:
        length = wire.HEADER_BYTES + one.route.n_bytes
        if messages[-1] and n_bytes + length > LINK_SEGMENT_BYTES:
            messages.append([])
            n_bytes = 0
        messages[-1].append(one)
        n_bytes += length
    return messages
