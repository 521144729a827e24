"""When workers that make the same steps take a snapshot: every so many seconds, with no message in most steps.

Worker 0 has the clock. After some steps all workers ask it whether it is time, and after how many more steps they ask
again: three quarters of the steps that seem to be left, so that a snapshot is late by a step or two, and a few times as
late where steps have become slower. Pure.

Cost: one agreement in each of some steps, about log4 of the number of steps between two snapshots.
"""

from __future__ import annotations

EARLY = 0.75  # of the steps that are left


class Cadence:
    """One worker's count. every_s: from one snapshot to the next. now: worker 0's time at the beginning."""

    def __init__(self, every_s: float, now: float) -> None:
        self._every_s = every_s
        self._last_s = now
        self._steps = 0  # since the last snapshot
        self._ask_in = 1

    def ask_next(self) -> None:
        """Ask in the next step."""
        self._ask_in = 1

    def ask(self) -> bool:
        """Count a step. Whether all workers ask worker 0 now."""
        self._steps += 1
        self._ask_in -= 1
        return self._ask_in == 0

    def decide(self, now: float) -> tuple[bool, int]:
        """At worker 0: whether a snapshot is due, and after how many steps to ask again."""
        step_s = max((now - self._last_s) / self._steps, 1e-9)
        left_s = self._every_s - (now - self._last_s)
        due = left_s <= step_s / 2
        return due, max(1, int(EARLY * (self._every_s if due else left_s) / step_s))

    def decided(self, due: bool, ask_in: int, now: float) -> None:
        """Act on what worker 0 has decided. now: any time on the other workers."""
        self._ask_in = ask_in
        if due:
            self._last_s, self._steps = now, 0
