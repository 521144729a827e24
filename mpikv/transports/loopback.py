"""Messages of a rank to itself: between a worker and the owner inside it. They are copied, and not sent.

Messages of one tag meet in their order, as a transport's do. What is received is a copy, made when both sides have
asked for it; of arrays in device memory on the GPU, in the store's stream. Both sides are in one process, use one
space, and call under the engine's lock.

Cost: one copy.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Completion, Operation
from mpikv.transports import wire
from mpikv.transports.base import Incoming, Transport


class Loopback:
    """The messages of one rank to itself."""

    def __init__(self) -> None:
        self._sent: defaultdict[int, deque[tuple[Any, Completion]]] = defaultdict(deque)
        self._asked: defaultdict[int, deque[tuple[Any, Completion]]] = defaultdict(deque)

    def send(self, array: Any, tag: int) -> Operation:
        """Send an array of a space. Once this is done it may be changed, behind what is in the store's stream."""
        return self._meet(array, self._sent[tag], tag)

    def receive(self, into: Any, tag: int) -> Operation:
        """Copy what is sent into an array of the same length; None: it is thrown away."""
        return self._meet(into, self._asked[tag], tag)

    def probe(self, rank: int, tag: int) -> Incoming | None:
        """Return what has been sent with this tag, and take it off the queue; None where there is nothing."""
        if not self._sent.get(tag):
            return None
        array, left = self._sent[tag].popleft()
        return _ToOneself(rank, array, left)

    def _meet(self, array: Any, mine: deque[tuple[Any, Completion]], tag: int) -> Operation:
        done = Completion()
        mine.append((array, done))
        sent, asked = self._sent[tag], self._asked[tag]
        if sent and asked:
            (source, left), (into, came) = sent.popleft(), asked.popleft()
            if into is not None:
                _copy(into, source)
            left.finish()
            came.finish()
        if not sent and not asked:
            del self._sent[tag], self._asked[tag]
        return done


def _copy(into: Any, source: Any) -> None:
    if isinstance(into, np.ndarray):
        into.reshape(-1).view(np.uint8)[...] = source.reshape(-1).view(np.uint8)
    else:
        into[...] = source


class _ToOneself:
    """A message that has been probed for."""

    def __init__(self, source: int, array: HostArray, left: Completion) -> None:
        self.source, self.n_bytes, self._array, self._left = source, array.nbytes, array, left

    def receive(self, buf: HostArray) -> Operation:
        _copy(buf, self._array)
        self._left.finish()
        return self._left


class OwnRank:
    """A transport, over another one, of which a rank's messages to itself are copied."""

    local: None = None

    def __init__(self, inner: Transport, loopback: Loopback) -> None:
        self.inner, self._loopback = inner, loopback
        self.rank, self.size, self.max_tag, self.hosts = inner.rank, inner.size, inner.max_tag, inner.hosts
        self.clock, self.recorder, self.ledger = inner.clock, inner.recorder, inner.ledger

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        if dest == self.rank and tag != wire.TAG_CONTROL:  # who waits for control messages knows the other transport
            return self._loopback.send(buf, tag)
        return self.inner.isend(buf, dest, tag)

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Operation:
        if source == self.rank:
            return self._loopback.receive(buf, tag)
        return self.inner.irecv(buf, source, tag, room_bytes)

    def probe(self, tag: int) -> Incoming | None:
        return self._loopback.probe(self.rank, tag) or self.inner.probe(tag)

    def poll(self) -> None:
        self.inner.poll()

    def close(self) -> None:
        self.inner.close()
