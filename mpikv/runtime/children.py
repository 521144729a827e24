"""Processes that a rank starts have its place in the job, in their environment, and must not take it.

A data loader's workers (multiprocessing's `spawn` and `forkserver`), or a program started through `subprocess`, inherit
the variables by which MPI_Init finds out who it is. If such a process makes a store, two processes are one rank: a
segmentation fault, or a wait without an end. So a rank that has initialised MPI marks its environment with its process
id, which its children inherit, and whoever has the mark of one of its parents is refused before MPI_Init. The ranks of
an `mpirun` that a rank has started are none of its children: their launcher stands between them.

All calls are local.
"""

from __future__ import annotations

import os

from mpikv.errors import ConfigError
from mpikv.runtime import launcher

MARK = "_MPIKV_RANK_PID"
IDENTITIES = ("PMIX_RANK", "PMI_RANK", "PMI_FD")  # what MPI_Init reads of its place, with any launcher


def mark() -> None:
    """Note, for processes that this one starts, that it is a rank of a job."""
    if _has_place():
        os.environ[MARK] = str(os.getpid())


def is_child() -> bool:
    """Return whether this process was started by a rank, whose place in the job it has inherited."""
    pid = os.environ.get(MARK, "")
    return pid.isdigit() and _has_place() and int(pid) in launcher.parents_below_launcher()


def check() -> None:
    """Raise ConfigError where this process was started by a rank."""
    if is_child():
        raise ConfigError(
            f"this process, {os.getpid()}, was started by a rank (process {os.environ[MARK]}), and that one alone can "
            "use the job's MPI: make the store there, or a 'local' one here. Where multiprocessing or a DataLoader "
            'started it, put what the program does below `if __name__ == "__main__":`, for they import it again'
        )


def _has_place() -> bool:
    return any(name in os.environ for name in IDENTITIES)
