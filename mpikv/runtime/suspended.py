"""Ranks of this host that were suspended, and are given up, where a job goes on without those that die.

They are killed, which is noticed as any other death: so none wakes up among ranks that have gone on without it, with
messages and memory of its own. The lowest rank that looks does it. Nobody can look at one that is alone on its host but
`mpikv launch`, whose process above each rank does the same (commands/launch/command.py).

Cost: a thread that sleeps, and looks at the host's ranks LOOKS times in half of MPIKV_TIMEOUT_S.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence

from mpikv.common.suspended import LOOKS, Suspended, given_up_text, interval_s
from mpikv.observe.program import STATES, Process, state_of, this_process
from mpikv.observe.stall import say


def watch(processes: Sequence[Process], timeout_s: float) -> Callable[[], None]:
    """Give up those of a job's ranks that are suspended. Returns what ends it. timeout_s: how long ranks wait."""
    mine, over = this_process(), threading.Event()
    here = [process for process in processes if process.host == mine.host]
    suspended = Suspended(LOOKS + here.index(mine))  # each later than the ranks before it, which may be suspended, too

    def look() -> None:
        while not over.wait(interval_s(timeout_s)):
            for pid in suspended.given_up(one.pid for one in here if state_of(one) == STATES["T"]):
                say(given_up_text(pid, timeout_s))
                with contextlib.suppress(ProcessLookupError):  # somebody else was quicker
                    os.kill(pid, signal.SIGKILL)

    threading.Thread(target=look, name="mpikv-suspended", daemon=True).start()
    return over.set
