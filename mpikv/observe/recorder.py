"""What a rank has done, record by record: a ring for each thread, which somebody may read while others go on.

A record is a tuple of fixed size, made when something has ended. Nothing is locked, copied or made into text for it;
where nobody reads, the oldest records of a ring are lost.

Cost: off, the reading of `on` at each place that records; on, about a microsecond for a record.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpikv.common.clock import MACHINE_CLOCK, Clock

KEPT = 1 << 16  # records of a thread: several seconds of small calls without a break, and some MiB

# kind, begin and end by the recorder's clock, what (its text is made when it is read), round or 0, bytes
Record = tuple[str, float, float, Any, int, int]


class Ring:
    """The records of one thread, which alone adds. thread: its name. taken: how many a reader has taken."""

    def __init__(self, thread: str) -> None:
        self.thread = thread
        self.records: deque[Record] = deque(maxlen=KEPT)
        self.added = self.taken = 0

    def take(self) -> list[Record]:
        """Take all records, oldest first. For one reader, from any thread."""
        found = [self.records.popleft() for _ in range(len(self.records))]
        self.taken += len(found)
        return found


class Part:
    """A part of what a rank does, from its making or the part before it until `done`."""

    __slots__ = ("_about", "_begun_s", "_recorder")

    def __init__(self, recorder: Recorder, *about: Any) -> None:
        self._recorder, self._about = recorder, about
        self._begun_s = recorder.now_s()

    def done(self, kind: str) -> None:
        self._recorder.add(kind, self._begun_s, *self._about)
        self._begun_s = self._recorder.now_s()


class Recorder:
    """What one rank has done in one store. clock: that of its transport.

    on: whether anybody reads. Who records looks at it first:
    """

    def __init__(self, clock: Clock = MACHINE_CLOCK) -> None:
        self.on = False
        self.now_s = clock.now_s
        self._rings: dict[int, Ring] = {}  # by thread

    def add(self, kind: str, begun_s: float, what: Any = None, round_: int = 0, n_bytes: int = 0) -> None:
        thread = threading.get_ident()
        ring = self._rings.get(thread)
        if ring is None:
            ring = self._rings.setdefault(thread, Ring(threading.current_thread().name))
        ring.added += 1
        ring.records.append((kind, begun_s, self.now_s(), what, round_, n_bytes))

    def begin(self, what: Any = None, round_: int = 0, n_bytes: int = 0) -> Part:
        return Part(self, what, round_, n_bytes)

    @contextmanager
    def span(self, kind: str, what: Any = None) -> Iterator[None]:
        begun_s = self.now_s()
        try:
            yield
        finally:
            self.add(kind, begun_s, what)

    def rings(self) -> list[Ring]:
        return [*self._rings.values()]
