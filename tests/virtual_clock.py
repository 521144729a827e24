"""A clock (mpikv/common/clock.py) whose time a test makes pass: no test of a limit takes longer than what it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class VirtualClock:
    """A time that passes only when a test lets it, for any number of threads.

    A thread that sleeps just lets other threads run, so that a test takes no longer than what it does.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._looked = threading.Condition()
        self._lookers: set[int] = set()  # threads that have looked since time passed last
        self._driver: int | None = None  # the thread that lets time pass

    def now_s(self) -> float:
        """Return the seconds that have been let pass."""
        if self._driver not in (None, threading.get_ident()):
            with self._looked:
                self._lookers.add(threading.get_ident())
                self._looked.notify_all()
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Let other threads run; no time passes."""
        time.sleep(0)

    def advance(
        self,
        seconds: float,
        *,
        turns: int = 1,
        lookers: int = 1,
        until: Callable[[], bool] = lambda: False,
        each_within_s: float = 30.0,
    ) -> None:
        """Let time pass, in `turns` equal pieces, and wait after each until `lookers` threads have looked at the clock.

        Ends early once `until()` says True, as when the threads that looked have ended. Blocks. Raises TimeoutError
        where the threads have not looked within `each_within_s` of the machine's time.
        """
        self._driver = threading.get_ident()
        try:
            for _ in range(turns):
                with self._looked:
                    self._now_s += seconds / turns
                    self._lookers.clear()
                    limit_s = time.monotonic() + each_within_s
                    while len(self._lookers) < lookers and not until():
                        if time.monotonic() > limit_s:
                            raise TimeoutError(f"{len(self._lookers)} threads look at the clock, {lookers} expected")
                        self._looked.wait(0.005)  # nothing wakes this thread when `until` has changed
                if until():
                    return
        finally:
            self._driver = None
