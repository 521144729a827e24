"""Who has closed the store, as a pure state machine at worker 0: each informs it, and it informs those still at work.

A worker that waits for a round must know whether somebody who is missing in it has ended. But programs end together, as
a rule: a message from each worker to each other would grow with the square of their number and be of use to nobody. So
worker 0 waits a moment, and then sends those who have not left what they need: of each key the fewest pushes that
anybody left with, and who it was. It does so again, in growing intervals, only when that has changed.

Cost: one message per worker; where some leave earlier than others, usually one more for each of those others. The time
is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

FIRST_S = 0.05  # all workers of a synchronous store get their last values within milliseconds of each other
LAST_S = 1.0  # how long a worker may wait in vain


class Fewest(NamedTuple):
    """How often a key was pushed by the worker that left with the fewest pushes of it."""

    key_id: int
    pushes: int
    worker: int


class Notice(NamedTuple):
    """To `worker`: of each key the fewest pushes that a worker has left with."""

    worker: int
    fewest: list[Fewest]


class Departures:
    """The workers that have closed the store. size: the number of workers. fewest: by key, of all who have left."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._left: set[int] = set()
        self.fewest: dict[int, Fewest] = {}
        self._unsent = False
        self._interval_s = FIRST_S
        self._due_s = 0.0

    def add(self, worker: int, pushes: Mapping[int, int], now_s: float) -> None:
        """Note that a worker has left. pushes: key id -> how often it pushed that key."""
        self._left.add(worker)
        changed = False
        for key_id in self.fewest.keys() | pushes.keys():
            count, known = pushes.get(key_id, 0), self.fewest.get(key_id)
            if known is None or count < known.pushes:
                self.fewest[key_id] = Fewest(key_id, count, worker)
                changed = True
        if changed and not self._unsent:
            self._unsent, self._due_s = True, now_s + self._interval_s

    def due(self, now_s: float) -> list[Notice]:
        """Return the notices that are due. Workers that have left need none, nor does worker 0, which knows."""
        if not self._unsent or now_s < self._due_s:
            return []
        self._unsent = False
        self._interval_s = min(2 * self._interval_s, LAST_S)
        fewest = sorted(self.fewest.values())
        return [Notice(worker, fewest) for worker in range(1, self._size) if worker not in self._left]
