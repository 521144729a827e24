"""The processes of this host, as /proc has them: which ones are the ranks of a job, or belong to a batch system's job.

Pure, but for `read`, over a table of processes by their numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mpikv.common import proc
from mpikv.runtime import launcher

# The job in the environment of its processes: Slurm, Grid Engine, PBS.
JOB_IDS = ("SLURM_JOB_ID", "JOB_ID", "PBS_JOBID")


class ProcessEntry(NamedTuple):
    """A process. state: a letter of proc_pid_stat(5). environ: {} for those of other users."""

    parent: int
    uid: int
    state: str
    name: str
    environ: Mapping[str, str]

    @property
    def rank(self) -> int | None:
        """The rank that a launcher has given to it, or to the process that started it; None: none has."""
        ranked = any(self.environ.get(name, "").isdigit() for name in launcher.RANKS)
        return launcher.said_rank(self.environ) if ranked else None

    @property
    def is_launcher(self) -> bool:
        return launcher.PROGRAMS.fullmatch(self.name) is not None


Table = Mapping[int, ProcessEntry]


def read() -> dict[int, ProcessEntry]:
    return {pid: entry for pid in proc.pids() if (entry := _entry(pid)) is not None}


def _entry(pid: int) -> ProcessEntry | None:
    state, parent, *_ = proc.stat(pid) or ("X", "0")
    if state in "ZX":  # it has ended, and perhaps nobody has asked how
        return None
    words = [word.split("=", 1) for word in proc.text(f"{pid}/environ").split("\0") if "=" in word]
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    return ProcessEntry(int(parent), uid, state, os.path.basename(proc.program(pid)), dict(words))


def below(table: Table, pid: int) -> set[int]:
    """Return a process and all that it has started, and these."""
    children: dict[int, list[int]] = {}
    for child, entry in table.items():
        children.setdefault(entry.parent, []).append(child)
    found, todo = set[int](), [pid]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += children.get(one, [])
    return found


def launcher_of(table: Table, pid: int) -> int:
    """Return the nearest process above that is mpirun or a part of it; 0 where there is none."""
    seen = set[int]()
    while (entry := table.get(pid)) is not None and pid not in seen:
        seen.add(pid)
        pid = entry.parent
        if pid in table and table[pid].is_launcher:
            return pid
    return 0


def ranks_beside(table: Table, pid: int, known: Iterable[int] = ()) -> dict[int, int]:
    """Return the process of each rank of this host of the job that `pid` is a rank of.

    Others inherit what says which rank a process is: shells before it and children of it. So those in `known` count
    first, which are known to be ranks, then programs of Python, then those that began first.
    """
    above, certain = launcher_of(table, pid), set(known)
    found: dict[int, list[int]] = {}
    for other in (below(table, above) - {above}) if above else ():
        entry = table[other]
        if entry.rank is not None and not entry.is_launcher and launcher_of(table, other) == above:
            found.setdefault(entry.rank, []).append(other)

    def order(one: int) -> tuple[bool, bool, int]:
        return one not in certain, not table[one].name.startswith("python"), one

    return {rank: min(several, key=order) for rank, several in sorted(found.items())}


def of_batch_job(table: Table, job: str) -> set[int]:
    """Return the processes of a job of Slurm, Grid Engine or PBS, whose number may be given without its server."""
    return {
        pid
        for pid, entry in table.items()
        if any(job in (value := entry.environ.get(name, ""), value.partition(".")[0]) for name in JOB_IDS)
    }
