"""The time, for all that measures it: the machine's, or in tests one that they make pass.

Whoever waits with a limit asks the clock of its transport; so all ranks of a test may have one in common.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What time it is, and how to let some pass."""

    def now_s(self) -> float:
        """Return the seconds since some moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let others run, for about so many seconds. Blocks."""
        ...


class MachineClock:
    """The time of this machine."""

    now_s = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


MACHINE_CLOCK: Clock = MachineClock()
