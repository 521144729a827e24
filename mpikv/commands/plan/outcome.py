"""What a predicted step gives: time, counts, and what was at work for how much of the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BUSY = 0.6  # a resource that works for less than this share of the time is not what the step waits for


@dataclass(frozen=True)
class PlannedStep:
    """A predicted exchange, and the step around it.

    exchange_s: from the end of the computing, in all workers at the same time, to the last worker's last value.
    overlapped_s: a step whose gradients leave as soon as they are there; None where nothing is computed. messages,
    sent_bytes: of the worker with most, in one step. busy_s: seconds at work in the exchange, by resource.
    """

    mode: str
    exchange_s: float
    overlapped_s: float | None
    messages: int
    sent_bytes: int
    busy_s: Mapping[str, float]

    @property
    def binds(self) -> tuple[str, float]:
        """Return what is at work for most of the exchange, and for which share of it; `waiting` where nothing is."""
        if self.exchange_s <= 0:
            return "nothing", 0.0
        what = max(self.busy_s, key=lambda name: self.busy_s[name])
        share = self.busy_s[what] / self.exchange_s
        return (what, share) if share >= BUSY else ("waiting", share)
