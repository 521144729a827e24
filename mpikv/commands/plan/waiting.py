"""When a waiting rank looks again: the gaps between its looks, from the constants of the real waiting.

A worker polls, then yields, then naps in growing steps (`engine/engine.py`); a server yields for longer first
(`server/loop.py`); beside a program that computes the progress thread looks in a fixed rhythm. What has arrived is seen
at the next look. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from mpikv.commands.plan.costs import Costs
from mpikv.engine.backoff import FIRST_NAP_S, LAST_NAP_S, NAP_GROWTH, POLLS, SHORT_NAPS, YIELDS
from mpikv.engine.engine import BUSY_NAP_S
from mpikv.server.loop import YIELD_S as SERVER_YIELD_S


class Rhythm:
    """The looks of one kind of rank."""

    def __init__(self, costs: Costs, *, server: bool = False) -> None:
        before = round(SERVER_YIELD_S / costs.poll_s) if server else 0
        naps = []
        nap_s = FIRST_NAP_S
        while nap_s < LAST_NAP_S:
            naps.append(nap_s)
            nap_s *= NAP_GROWTH
        gaps = [costs.poll_s] * (before + POLLS + YIELDS) + [nap + costs.nap_s + costs.poll_s for nap in naps]
        self._looks = [0.0, *accumulate(gaps)]
        self._last_s = LAST_NAP_S + costs.nap_s + costs.poll_s
        self._busy_s = BUSY_NAP_S + costs.nap_s + costs.poll_s
        # After a long wait a worker naps at once when it waits again.
        self._patient = before + POLLS + YIELDS + SHORT_NAPS
        self._again = 0 if server else POLLS + YIELDS

    def look(self, since_s: float, turn: int, arrival_s: float) -> tuple[float, int]:
        """Return when a rank that waits since `since_s` sees what arrives at `arrival_s`, and its next turn.

        turn: where among its looks it began to wait.
        """
        waited_s = arrival_s - since_s
        if waited_s <= 0:
            return since_s, turn
        begun_s = self._looks[turn]
        found = bisect_left(self._looks, begun_s + waited_s)
        next_turn = 0 if found <= self._patient else self._again
        if found < len(self._looks):
            return since_s + self._looks[found] - begun_s, next_turn
        beyond_s = begun_s + waited_s - self._looks[-1]
        naps = -(-beyond_s // self._last_s)
        return since_s + self._looks[-1] - begun_s + naps * self._last_s, next_turn

    def look_beside(self, since_s: float, arrival_s: float) -> float:
        """Return the same for a rank beside a program that computes."""
        waited_s = max(0.0, arrival_s - since_s)
        return since_s + -(-waited_s // self._busy_s) * self._busy_s
