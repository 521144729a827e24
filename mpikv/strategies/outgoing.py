"""Short pieces of values on their way to one server over a link: few at a time, those of higher priority first.

MPI sends a short message at once, also where nobody waits for it. If all pieces of a step were handed to MPI when they
are pushed, a request that comes later, such as that of a pull, would wait behind them in the connection, and so would
what is more urgent. So the others wait here. Whoever tests one piece moves the queue on.

Cost: no copy; one test of the oldest pieces under way for each test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation

UNDER_WAY_BYTES = 1 << 19  # 20 ms at 200 Mbit/s: longer than a sleeping thread takes to wake
MOST_UNDER_WAY = 64  # of pieces that are very short, so that MPI finds the matching message quickly


class OutgoingPiece:
    """A piece of a queue, as a request that is done when its array may be changed."""

    __slots__ = ("_queue", "data", "request", "tag")

    def __init__(self, queue: OutgoingPieces, data: HostArray, tag: int) -> None:
        self._queue, self.data, self.tag = queue, data, tag
        self.request: Operation | None = None

    def test(self) -> bool:
        """See `Operation`."""
        self._queue.move()
        return self.request is not None and self.request.test()


class OutgoingPieces:
    """Those for one server. start: begins to send an array under a tag."""

    def __init__(self, start: Callable[[HostArray, int], Operation]) -> None:
        self._start = start
        self._waiting: list[tuple[int, int, OutgoingPiece]] = []  # a heap: -priority, order
        self._under_way: deque[OutgoingPiece] = deque()
        self._bytes = self._order = 0

    def add(self, data: HostArray, tag: int, priority: int) -> OutgoingPiece:
        """Let a piece be sent. Pieces of equal priority leave in this order."""
        piece = OutgoingPiece(self, data, tag)
        self._order += 1
        heappush(self._waiting, (-priority, self._order, piece))
        self.move()
        return piece

    def move(self) -> None:
        """Start what may leave."""
        while self._under_way and (first := self._under_way[0]).request is not None and first.request.test():
            self._bytes -= self._under_way.popleft().data.nbytes
        while self._waiting and self._bytes < UNDER_WAY_BYTES and len(self._under_way) < MOST_UNDER_WAY:
            piece = heappop(self._waiting)[2]
            piece.request = self._start(piece.data, piece.tag)
            self._under_way.append(piece)
            self._bytes += piece.data.nbytes
