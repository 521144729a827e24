"""Short pieces of values that a server asks for when it can take them.

MPI sends a short message at once, also where nobody waits for it. Connections share a link unevenly: if all pieces
were handed to MPI when they are pushed, those of one worker would be at the server long before those of another, while
a sum needs both, and answers would wait. And they would wait in the connection before what is more urgent.

So MPI gets a piece when the server asks for it, but the first ones, which would wait for nothing but the question.

Cost: no copy; a control message of the server for each time that it can take more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation

AHEAD = 2  # as many as cross a link of 1 Gbit/s while the first question comes


class OfferedPiece:
    """A piece, as a request that is done when its array may be changed."""

    __slots__ = ("data", "request")

    def __init__(self, data: HostArray) -> None:
        self.data = data
        self.request: Operation | None = None

    def test(self) -> bool:
        return self.request is not None and self.request.test()


class OfferedPieces:
    """Those for one server. start: begins to send an array under a tag.

    The first AHEAD pieces of a push leave unasked while the server has asked for all that was offered before.
    """

    def __init__(self, start: Callable[[HostArray, int], Operation]) -> None:
        self._start = start
        self._unasked: dict[int, deque[OfferedPiece]] = {}  # by their tag

    def add(self, data: HostArray, tag: int) -> OfferedPiece:
        piece, unasked = OfferedPiece(data), self._unasked.setdefault(tag, deque())
        unasked.append(piece)
        if len(self._unasked) == 1 and len(unasked) <= AHEAD:
            piece.request = self._start(data, tag)
        return piece

    def send(self, tag: int, count: int) -> None:
        unasked = self._unasked[tag]
        for _ in range(count):
            piece = unasked.popleft()
            if piece.request is None:
                piece.request = self._start(piece.data, tag)
        if not unasked:
            del self._unasked[tag]

    def send_all(self) -> None:
        for tag, unasked in tuple(self._unasked.items()):
            self.send(tag, len(unasked))
