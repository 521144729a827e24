"""A group whose messages are arrays in a GPU's memory, for collectives over CUDA-aware MPI.

MPI takes an address and knows nothing of streams, while a collective's additions are only put into the store's stream.
So `isend` and `irecv` record an event in that stream, and a message is handed to MPI when its event is done: all work
on its array that the stream had been given before has ended then. No thread waits for that: a test of any message of
the group starts all messages whose events are done. Events of one stream are done in their order, so messages start in
the order in which they were asked for, as MPI requires. Received values are in memory before the stream is given any
work on them.

Only sends and receives reach MPI; values are combined in the store's stream.

Cost: an event for each message, and the transport's own. While a message waits to be started, each step of the engine
tests it. Restrictions: the transport takes device memory. It is called in whatever thread steps the engine. This GPU is
that thread's current one when a message is started, but another GPU of the process may be when messages are tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation, Waiter, Waking, wakes
from mpikv.spaces.device import DeviceSpace
from mpikv.transports.base import Group, Transport


class DeviceGroup(Group):
    """Ranks of a transport that takes device memory. waiting: messages that are not started, also of its `part`s."""

    on_device = True

    def __init__(
        self, transport: Transport, ranks: Sequence[int], space: DeviceSpace, waiting: deque[Message] | None = None
    ) -> None:
        super().__init__(transport, ranks)
        self._space = space
        self._waiting: deque[Message] = deque() if waiting is None else waiting

    def isend(self, buf: Any, dest: int, tag: int) -> Operation:
        """Do what `Group.isend` does, once all work that the store's stream has been given by now is done."""
        return self._begin(self.transport.isend, buf, self.ranks[dest], tag)

    def irecv(self, buf: Any, source: int, tag: int) -> Operation:
        """Do what `Group.irecv` does, once all work that the store's stream has been given by now is done."""
        return self._begin(self.transport.irecv, buf, self.ranks[source], tag)

    def _begin(self, call: Callable[..., Operation], buf: Any, rank: int, tag: int) -> Message:
        def start() -> Operation:
            with self._space.in_stream():
                return call(buf, rank, tag)

        message = Message(self._waiting, self._space.stream_event(), start)
        self._waiting.append(message)
        start_due(self._waiting)
        return message

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        array: Any = self._space.empty(n_elems, dtype)
        return array  # type: ignore[no-any-return]

    def part(self, ranks: Sequence[int]) -> DeviceGroup:
        chosen = [self.ranks[rank] for rank in ranks]
        return DeviceGroup(self.transport, chosen, self._space, self._waiting)


class Message(Waking):
    """A request for one message, which `start` hands to the transport when the event `due` is done."""

    __slots__ = ("_done", "_due", "_request", "_start", "_waiting")

    def __init__(self, waiting: deque[Message], due: Operation, start: Callable[[], Operation]) -> None:
        self._waiting, self._due, self._start = waiting, due, start
        self._request: Operation | None = None
        self._done = False

    def start_if_due(self) -> bool:
        """Return whether it is started. Raises MpikvError where the GPU has failed."""
        if self._due.test():
            self._request = self._start()
        return self._request is not None

    def test(self) -> bool:
        """Return whether the message is done. Starts all messages of the group that are due."""
        if not self._done:
            start_due(self._waiting)
            self._done = self._request is not None and self._request.test()
        return self._done

    def wakes(self, waiter: Waiter) -> bool:
        """Promise what the transport's request does; False while a message waits, since only a test starts it."""
        return not self._waiting and wakes(self._request, waiter)


def start_due(waiting: deque[Message]) -> None:
    while waiting and waiting[0].start_if_due():
        waiting.popleft()
