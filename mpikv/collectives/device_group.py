"""A group whose messages are arrays in a GPU's memory, for collectives over CUDA-aware MPI.

MPI takes an address and knows nothing of streams, while what a collective adds is only put into the store's stream. So
a message waits here until that stream has come as far as it was when the message was asked for: what is sent has been
computed by then, and what is received into is read and written no more. Nobody waits for that; whoever tests a message
of the group starts all whose time has come. Events of one stream are done in their order, so messages start in the
order in which they were asked for, as MPI has to see them. What has been received is in memory before the stream is
given any work on it.

Only sends and receives reach MPI; values are combined in the store's stream.

Cost: an event for each message, and the transport's own. While a message waits to be started its generator is asked in
each step of the engine. Restrictions: the transport takes device memory. It is called in whatever thread steps the
engine, with this GPU as that thread's current one when a message is started; when it is asked whether messages are
done, another GPU of the process may be.
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
    """Some ranks of a transport that takes device memory. It moves arrays of one space.

    waiting: the messages that are not started yet, of this group and those that share it.
    """

    on_device = True

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        space: DeviceSpace,
        waiting: deque[Message] | None = None,
    ) -> None:
        super().__init__(transport, ranks)
        self._space = space
        self._waiting: deque[Message] = deque() if waiting is None else waiting

    def isend(self, buf: Any, dest: int, tag: int) -> Operation:
        """As `Group.isend`, behind what the store's stream has been given by now."""
        rank = self.ranks[dest]
        return self._begin(self.transport.isend, buf, rank, tag)

    def irecv(self, buf: Any, source: int, tag: int) -> Operation:
        """As `Group.irecv`, behind what the store's stream has been given by now."""
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
        """On the GPU."""
        array: Any = self._space.empty(n_elems, dtype)
        return array  # type: ignore[no-any-return]

    def part(self, ranks: Sequence[int]) -> DeviceGroup:
        """Some of them. Their messages wait with those of this group."""
        chosen = [self.ranks[rank] for rank in ranks]
        return DeviceGroup(self.transport, chosen, self._space, self._waiting)


class Message(Waking):
    """A message: a request that is done when the transport's is, which is started when the stream has come so far.

    waiting: those that are not started yet, in their order.
    """

    __slots__ = ("_done", "_due", "_request", "_start", "_waiting")

    def __init__(self, waiting: deque[Message], due: Operation, start: Callable[[], Operation]) -> None:
        self._waiting, self._due = waiting, due
        self._start: Callable[[], Operation] | None = start
        self._request: Operation | None = None
        self._done = False

    @property
    def due(self) -> bool:
        """Whether the stream has come so far. Raises MpikvError where the GPU has failed."""
        return self._due.test()

    def start(self) -> None:
        """Hand it to the transport."""
        assert self._start is not None
        self._request, self._start = self._start(), None

    def test(self) -> bool:
        """Whether it is done. Starts what is due."""
        if not self._done:
            start_due(self._waiting)
            if self._request is not None and self._request.test():
                self._done, self._request = True, None
        return self._done

    def wakes(self, waiter: Waiter) -> bool:
        """As the transport's request does, unless some message is not started yet: that nobody else would notice."""
        return not self._waiting and wakes(self._request, waiter)


def start_due(waiting: deque[Message]) -> None:
    """Start the messages that need not wait for the stream any more, in their order."""
    while waiting and waiting[0].due:
        waiting.popleft().start()
