"""Messages of a rank to itself whose arrays are in device memory: between a worker and the server inside it.

They are not sent: what is received is a copy on the GPU, in the store's stream, begun when both sides have asked for
it. Messages of one tag meet in their order, as a transport's do. Both sides are in one process, use one space, and call
under the engine's lock.

Cost: one copy on the GPU.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from mpikv.engine.operation import Completion, Operation


class Loopback:
    """The messages of one rank to itself that have device arrays."""

    def __init__(self) -> None:
        self._sent: defaultdict[int, deque[tuple[Any, Completion]]] = defaultdict(deque)
        self._asked: defaultdict[int, deque[tuple[Any, Completion]]] = defaultdict(deque)

    def send(self, array: Any, tag: int) -> Operation:
        """Send an array of a space. Once this is done it may be changed, behind what is in the store's stream."""
        return self._meet(array, self._sent[tag], tag)

    def receive(self, into: Any, tag: int) -> Operation:
        """Copy what is sent into an array of the same length; None: it is thrown away."""
        return self._meet(into, self._asked[tag], tag)

    def _meet(self, array: Any, mine: deque[tuple[Any, Completion]], tag: int) -> Operation:
        done = Completion()
        mine.append((array, done))
        sent, asked = self._sent[tag], self._asked[tag]
        if sent and asked:
            (source, left), (into, came) = sent.popleft(), asked.popleft()
            if into is not None:
                into[...] = source
            left.finish()
            came.finish()
        if not sent and not asked:
            del self._sent[tag], self._asked[tag]
        return done
