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

from mpikv.arrays import HostArray
from mpikv.engine.request import Request
from mpikv.errors import MpikvError

EAGER_BYTES = 4096


class _Message:
    def __init__(self, source: int, tag: int, data: HostArray) -> None:
        self.source = source
        self.tag = tag
        self.data = data
        self.received = False

    def test(self) -> bool:
        """Whether the sender may change its array again."""
        return self.received or self.data.nbytes <= EAGER_BYTES

    def move_to(self, buf: HostArray, room_bytes: int = 0) -> None:
        target = buf.reshape(-1).view(np.uint8)
        if self.data.size == target.size - room_bytes:
            target = target[: self.data.size]
        if target.size != self.data.size:
            raise MpikvError(
                f"message from rank {self.source}, tag {self.tag}: {self.data.size} bytes, {target.size} expected"
            )
        target[:] = self.data
        self.received = True


class Fabric:
    """The mailboxes of `size` thread ranks; `hosts` pretends where each of them runs."""

    def __init__(self, size: int, hosts: Sequence[str] | None = None) -> None:
        self.size = size
        self.hosts = tuple(hosts) if hosts is not None else ("localhost",) * size
        self.lock = threading.Lock()
        self.boxes: list[deque[_Message]] = [deque() for _ in range(size)]
        self.posted: list[deque[_Receive]] = [deque() for _ in range(size)]
        self.sent_messages = 0
        self.sent_bytes = 0
        self.bytes_between: Counter[tuple[int, int]] = Counter()  # by (sender, receiver)

    def rank(self, rank: int) -> ThreadTransport:
        """The transport of one rank."""
        return ThreadTransport(self, rank)


class _Receive:
    def __init__(  # noqa: PLR0917 - what a receive is
        self, fabric: Fabric, me: int, source: int, tag: int, buf: HostArray, room_bytes: int
    ) -> None:
        self._fabric = fabric
        self._me = me
        self.source = source
        self.tag = tag
        self._buf, self._room_bytes = buf, room_bytes
        self._done = False

    def test(self) -> bool:
        """Whether the message has been received."""
        if not self._done:
            with self._fabric.lock:
                _match(self._fabric, self._me)
        return self._done

    def take(self, message: _Message) -> None:
        message.move_to(self._buf, self._room_bytes)
        self._done = True


def _match(fabric: Fabric, me: int) -> None:
    """Give messages to receives in the order posted, as MPI does."""
    posted, box = fabric.posted[me], fabric.boxes[me]
    for receive in tuple(posted):
        for message in box:
            if message.source == receive.source and message.tag == receive.tag:
                box.remove(message)
                posted.remove(receive)
                receive.take(message)
                break


class _Incoming:
    def __init__(self, message: _Message) -> None:
        self._message = message
        self.source = message.source
        self.n_bytes = message.data.nbytes

    def receive(self, buf: HostArray) -> Request:
        self._message.move_to(buf)
        return self._message


class ThreadTransport:
    """One rank of a `Fabric`."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self._fabric = fabric
        self.rank = rank
        self.size = fabric.size
        self.max_tag = 2**31 - 1
        self.hosts = fabric.hosts
        self.sent_messages = 0
        self.sent_bytes = 0

    def isend(self, buf: HostArray, dest: int, tag: int) -> Request:
        """Put a message in the mailbox of `dest`; a short one is copied."""
        data = buf.reshape(-1).view(np.uint8)
        if data.nbytes <= EAGER_BYTES:
            data = data.copy()
        message = _Message(self.rank, tag, data)
        with self._fabric.lock:
            self._fabric.boxes[dest].append(message)
            self.sent_messages += 1
            self.sent_bytes += data.nbytes
            self._fabric.sent_messages += 1
            self._fabric.sent_bytes += data.nbytes
            self._fabric.bytes_between[self.rank, dest] += data.nbytes
        return message

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Request:
        """Post a receive."""
        receive = _Receive(self._fabric, self.rank, source, tag, buf, room_bytes)
        with self._fabric.lock:
            self._fabric.posted[self.rank].append(receive)
            _match(self._fabric, self.rank)  # a message that is there is received at once, as by MPI
        return receive

    def probe(self, tag: int) -> _Incoming | None:
        """The next message with this tag, whoever sent it."""
        with self._fabric.lock:
            box = self._fabric.boxes[self.rank]
            for message in box:
                if message.tag == tag:
                    box.remove(message)
                    return _Incoming(message)
        return None

    def close(self) -> None:
        """Nothing to give back."""
