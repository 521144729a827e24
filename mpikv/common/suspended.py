"""Processes of this host that were suspended (SIGSTOP) for so long that others go on without them, for good.

Looks are counted, not seconds: who looks may have been suspended, too, as with a whole job. Not meant is a process that
runs now and then, as where a tool stops it again and again to slow it down, nor one that a debugger has stopped.

Cost: a file of /proc for each process and look. Only the standard library is imported: see commands/launch/quick.py.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from mpikv.common import proc

LOOKS = 8  # in so many after the first one it was found suspended, and has not run since
SHARE = 0.5  # of MPIKV_TIMEOUT_S, in which so many looks are made: others then have time left to wait for it
FIELDS = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")  # of proc_pid_status(5)


class Suspended:
    """What one process has seen of others. looks: LOOKS, or more where others are to come first."""

    def __init__(self, looks: int = LOOKS) -> None:
        self._looks = looks
        self._seen: dict[tuple[int, tuple[str, ...]], int] = {}  # process, and what differs once it has run -> looks

    def given_up(self, pids: Iterable[int]) -> list[int]:
        """Look at these processes; return those that are given up."""
        before, self._seen = self._seen, {}
        for pid in pids:
            lines = tuple(line for line in proc.text(f"{pid}/status").splitlines() if line.startswith(FIELDS))
            if "State:\tT (stopped)" in lines:
                self._seen[pid, lines] = before.get((pid, lines), -1) + 1
        return [pid for (pid, _), looks in self._seen.items() if looks >= self._looks]


def interval_s(timeout_s: float) -> float:
    """From one look to the next one. timeout_s: how long ranks wait for each other."""
    return timeout_s * SHARE / LOOKS


def given_up_text(pid: int, timeout_s: float) -> str:
    """What is said of a process that is given up."""
    return (
        f"mpikv: process {pid} on {socket.gethostname()} was suspended for {timeout_s * SHARE:g} s, half of "
        "MPIKV_TIMEOUT_S: it is killed, so that others can go on without it"
    )
