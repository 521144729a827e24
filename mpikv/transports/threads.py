"""Ranks that are threads of one process: the transport of most tests.

Same behaviour as the MPI transport as far as a caller can see: messages of one (sender, receiver, tag) arrive in order;
a short message is copied when it is sent (eager), a long one only when it is received (rendezvous), so that a sender
that changes its array too early is found out.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.clock import MACHINE_CLOCK, Clock
from mpikv.engine.operation import Completion, Operation
from mpikv.errors import ShapeMismatch
from mpikv.observe.recorder import Recorder
from mpikv.transports.base import Transport, take_first
from mpikv.transports.ledger import Ledger
from mpikv.transports.wire import TAG_REPLY

EAGER_BYTES = 4096


class _Message(Completion):
    """A message that is under way. As a request, it is the sender's."""

    __slots__ = ("data", "number", "source", "tag")

    def __init__(self, number: int, source: int, tag: int, data: HostArray) -> None:
        super().__init__()
        self.number = number
        self.source = source
        self.tag = tag
        self.data = data
        if data.nbytes <= EAGER_BYTES:
            self.finish()  # the sender may change its array again

    def move_to(self, buf: HostArray, room_bytes: int = 0) -> None:
        """Copy the message into `buf`, which may be exactly `room_bytes` longer."""
        target = buf.reshape(-1).view(np.uint8)
        if self.data.size == target.size - room_bytes:
            target = target[: self.data.size]
        if target.size != self.data.size:
            self.finish()
            raise ShapeMismatch(
                f"message from rank {self.source}, tag {self.tag}: {self.data.size} bytes, {target.size} expected"
            )
        target[:] = self.data
        self.finish()


class _PostedReceive(Completion):
    """A receive whose message has not come yet."""

    __slots__ = ("buf", "room_bytes", "transport")

    def __init__(self, transport: ThreadTransport, buf: HostArray, room_bytes: int) -> None:
        super().__init__()
        self.transport = transport
        self.buf, self.room_bytes = buf, room_bytes

    def test(self) -> bool:
        if not self.done:
            self.transport.poll()
        return super().test()


Route = tuple[int, int]  # source and tag


class _Box:
    """What one rank has been sent and not received, and its receives that wait, both in the order of their routes."""

    def __init__(self) -> None:
        self.messages: dict[Route, deque[_Message]] = {}
        self.receives: dict[Route, deque[_PostedReceive]] = {}
        self.count = 0  # of messages ever sent to it

    def match(self) -> None:
        """Give messages to receives in the order in which the receives were posted, as MPI does."""
        for route in [route for route in self.receives if route in self.messages]:
            while route in self.receives and route in self.messages:
                receive = take_first(self.receives, route)
                try:
                    take_first(self.messages, route).move_to(receive.buf, receive.room_bytes)
                    receive.finish()
                except ShapeMismatch as error:
                    receive.finish(error)


class Fabric:
    """The mailboxes of `size` thread ranks; `hosts` pretends where each of them runs, `clock` what time it is."""

    def __init__(self, size: int, hosts: Sequence[str] | None = None, clock: Clock | None = None) -> None:
        self.size = size
        self.clock: Clock = MACHINE_CLOCK if clock is None else clock
        self.hosts = tuple(hosts) if hosts is not None else ("localhost",) * size
        self.lock = threading.Lock()
        self.boxes = [_Box() for _ in range(size)]
        self.sent_messages = 0
        self.sent_bytes = 0
        self.bytes_between: Counter[tuple[int, int]] = Counter()  # by (sender, receiver)

    def rank(self, rank: int) -> Transport:
        """The transport of one rank."""
        return ThreadTransport(self, rank)


class _Incoming:
    def __init__(self, message: _Message) -> None:
        self._message = message
        self.source = message.source
        self.n_bytes = message.data.nbytes

    def receive(self, buf: HostArray) -> Operation:
        self._message.move_to(buf)
        return self._message


class ThreadTransport:
    """One rank of a `Fabric`."""

    local: None = None  # all are messages

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self._fabric = fabric
        self._box = fabric.boxes[rank]
        self._seen = -1  # how many messages had come at the last look
        self.rank = rank
        self.size = fabric.size
        self.max_tag = 2**31 - 1
        self.hosts = fabric.hosts
        self.clock = fabric.clock
        self.recorder = Recorder(self.clock)
        self.ledger = Ledger()

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        data = buf.reshape(-1).view(np.uint8)
        if data.nbytes <= EAGER_BYTES:
            data = data.copy()
        with self._fabric.lock:
            box = self._fabric.boxes[dest]
            message = _Message(box.count, self.rank, tag, data)
            box.messages.setdefault((self.rank, tag), deque()).append(message)
            box.count += 1
            ledger = self.ledger
            ledger.messages += 1
            ledger.by_tag[tag if tag < TAG_REPLY or tag >= ledger.tags_from else TAG_REPLY] += data.nbytes
            self._fabric.sent_messages += 1
            self._fabric.sent_bytes += data.nbytes
            self._fabric.bytes_between[self.rank, dest] += data.nbytes
        return message

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Operation:
        receive = _PostedReceive(self, buf, room_bytes)
        with self._fabric.lock:
            self._box.receives.setdefault((source, tag), deque()).append(receive)
            self._seen = -1
        self.poll()  # a message that is there is received at once, as by MPI
        return receive

    def poll(self) -> None:
        """Receive the messages that have come for receives that wait."""
        if self._seen != self._box.count:
            with self._fabric.lock:
                self._seen = self._box.count
                self._box.match()

    def probe(self, tag: int) -> _Incoming | None:
        with self._fabric.lock:
            messages = self._box.messages
            routes = [route for route in messages if route[1] == tag]
            if not routes:
                return None
            return _Incoming(take_first(messages, min(routes, key=lambda route: messages[route][0].number)))

    def close(self) -> None:
        pass
