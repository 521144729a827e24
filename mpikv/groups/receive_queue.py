"""Receives of a group, matched with messages as MPI does it: by sender and tag, in the order of the receives.

A message is taken off MPI's queue when it has arrived (a matched probe), so that a message that is not as long as its
buffer is an error. A receive with too short a buffer must not be posted: Open MPI (5.0.11) reports an error for it, but
only after it has written the whole message past the buffer's end.

Cost: one message; one probe per step of the engine for each tag that a receive waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Predicate, Steps
from mpikv.errors import ShapeMismatch
from mpikv.transports.base import Group, Incoming


@dataclass(eq=False)
class _Posted:
    """A receive that waits for its message. found: the message, once there is one."""

    source: int | None
    found: Incoming | None = None


class ReceiveQueue:
    """The receives of a group under one tag. source: a rank of the transport, None: any."""

    def __init__(self, group: Group, tag: int) -> None:
        self.group, self.tag = group, tag
        self._posted: deque[_Posted] = deque()
        self._arrived: list[Incoming] = []

    def receive(self, buf: HostArray, source: int | None) -> Steps[int]:
        """Receive exactly `buf.nbytes` bytes from a rank of the group, None: any. Returns that rank."""
        return self._receive_all({self._post(source): buf})

    def receive_all(self, bufs: Mapping[int, HostArray]) -> Steps[int]:
        """Receive exactly `bufs[rank]` from each rank in it, in the order in which the messages arrive."""
        return self._receive_all({self._post(rank): buf for rank, buf in bufs.items()})

    def _post(self, source: int | None) -> _Posted:
        posted = _Posted(None if source is None else self.group.ranks[source])
        self._posted.append(posted)
        return posted

    def _receive_all(self, wanted: dict[_Posted, HostArray]) -> Steps[int]:
        """Returns who has sent the last one that was matched."""
        waiting, receives, wrong, sender = dict(wanted), [], [], -1

        def match_all() -> bool:
            nonlocal sender
            for posted in [one for one in waiting if self._match(one)]:
                incoming, buf = posted.found, waiting.pop(posted)
                assert incoming is not None
                sender = self.group.ranks.index(incoming.source)
                if incoming.n_bytes != buf.nbytes:
                    wrong.append(
                        f"the message of rank {sender} of the group has {incoming.n_bytes} bytes, the tensor to "
                        f"receive it has {buf.nbytes}"
                    )
                    # It is received even so, since its sender waits for that.
                    buf = np.empty(incoming.n_bytes, np.uint8)
                receives.append(incoming.receive(buf))
            return bool(wrong) or not waiting

        try:
            yield Predicate(match_all)
        finally:
            for posted in wanted:
                self._posted.remove(posted)
        if wrong:
            raise ShapeMismatch("; ".join(wrong))
        yield from receives
        return sender

    def _match(self, posted: _Posted) -> bool:
        if posted.found is None:
            while (incoming := self.group.transport.probe(self.tag)) is not None:
                self._arrived.append(incoming)
            for message in tuple(self._arrived):
                matching = (one for one in self._posted if one.source in (None, message.source) and one.found is None)
                receive = next(matching, None)
                if receive is not None:
                    receive.found = message
                    self._arrived.remove(message)
        return posted.found is not None
