"""Messages between two ranks of a group, matched as MPI does it: by sender and tag, in the order of the receives.

A message is taken off MPI's queue when it has arrived (a matched probe), so that its length is known before it is
received: one that is not as long as its buffer is an error, not a number in a part of it. Receives may be from any
sender; each takes the first message that fits it and no earlier receive.

Cost: one message; one probe per step of the engine for each tag that somebody waits for.
"""

from __future__ import annotations

from collections import deque

from mpikv.arrays import HostArray
from mpikv.engine.request import Predicate, Steps
from mpikv.errors import ShapeMismatch
from mpikv.transports.base import Group, Incoming


class _Posted:
    def __init__(self, source: int | None) -> None:
        self.source = source
        self.found: Incoming | None = None


class Mailbox:
    """The receives of a group under one tag. source: a rank of the transport, None: any."""

    def __init__(self, group: Group, tag: int) -> None:
        self._group, self._tag = group, tag
        self._posted: deque[_Posted] = deque()
        self._arrived: list[Incoming] = []

    def receive(self, buf: HostArray, source: int | None) -> Steps[int]:
        """Receive exactly `buf.nbytes` bytes from a rank of the group, None: any. Returns that rank."""
        posted = _Posted(None if source is None else self._group.ranks[source])
        self._posted.append(posted)
        return self._receive(posted, buf)

    def _receive(self, posted: _Posted, buf: HostArray) -> Steps[int]:
        try:
            yield Predicate(lambda: self._match(posted))
        finally:
            if posted in self._posted:
                self._posted.remove(posted)
        incoming = posted.found
        assert incoming is not None
        sender = self._group.ranks.index(incoming.source)
        if incoming.n_bytes == buf.nbytes:
            yield incoming.receive(buf)
            return sender
        raise ShapeMismatch(
            f"recv: the message of rank {sender} of the group has {incoming.n_bytes} bytes, the tensor to receive it "
            f"has {buf.nbytes}"
        )

    def _match(self, posted: _Posted) -> bool:
        if posted.found is None:
            while (incoming := self._group.transport.probe(self._tag)) is not None:
                self._arrived.append(incoming)
            for message in tuple(self._arrived):
                fitting = (one for one in self._posted if one.source in (None, message.source) and one.found is None)
                receive = next(fitting, None)
                if receive is not None:
                    receive.found = message
                    self._arrived.remove(message)
        return posted.found is not None
