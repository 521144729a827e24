"""Whether a job that has ended is started again, and from which state it goes on. Pure: no clock, no processes.

A job is started again where a rank or `mpirun` was killed, died of a signal or went away with its host, and where a
rank failed by an error of its own, which may be one of the machine. The same error at the same step twice is the
program's: the job ends with it. What was asked for (a signal, a time limit), or has never begun, is not started again.

Snapshots are files of the workers' (common/snapshot_names.py), which the processes above the ranks report.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpikv.commands.launch.ranks import LOST_PEER, JobEnd, LaunchedRank, culprit, is_signal
from mpikv.common.snapshot_names import ShareName, parse, whole

RANK = re.compile(r"^(mpikv: error: )?\[rank \d+ of \d+ on \S+\] ")


class OwnError(NamedTuple):
    """An error of a rank: its last line, and the step after which it came. step: None where nobody counts steps."""

    error: str
    step: int | None


class Restarts:
    """most: how often the job may be started again. saved: the files of snapshots, as the last run that had any."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.made = 0
        self.saved: Sequence[ShareName] = ()
        self._begun = False  # whether a run has; else what was asked for may be impossible
        self._mistake: OwnError | None = None  # of the last run

    def note(self, names: Iterable[str]) -> None:
        """Note the names of files that a run has left. One that tells of none has not begun, and removed none."""
        self.saved = [*filter(None, map(parse, names))] or self.saved

    def goes_on_from(self, stop_file: str) -> str:
        """From which state the next run goes on, in words. stop_file: "" where there is none."""
        if found := whole(self.saved):
            return f"from step {found[0].step}"
        return f"from {stop_file}" if stop_file else "from the beginning, as nothing was saved"

    def again(self, ranks: Sequence[LaunchedRank], end: JobEnd, *, asked: bool) -> tuple[bool, str]:
        """Whether to start once more, and why not, "" where there is nothing to say. asked: the end was asked for."""
        self._begun = self._begun or any(rank.host for rank in ranks) or is_signal(end.status)
        if end.status == 0 or asked or self.most == 0 or not self._begun:
            return False, ""
        first = culprit(ranks, mpirun_failed=True)
        if first is not None and first.error:
            return False, ""
        mistake = None  # where it was killed, or another rank's end has ended it
        if first is not None and not is_signal(end.status) and first.status != LOST_PEER:
            mistake = OwnError(RANK.sub("", first.said), first.step)
        if mistake is not None and mistake == self._mistake:
            where = "" if mistake.step is None else f" after step {mistake.step}"
            return False, f"not started again: the same error{where} as in the run before"
        self._mistake = mistake
        if self.made == self.most:
            return False, f"not started again: that was done {self.most} times (--restarts)"
        self.made += 1
        return True, ""
