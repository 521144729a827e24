"""The processes of a job on this host, found in /proc, and how they are ended.

A rank's own process tree is found through its parents: the process above it adopts every orphan of the tree
(PR_SET_CHILD_SUBREAPER), so none escapes. What a killed one leaves is found by a variable that every process of the job
has in its environment. Linux only, as are both MPIs' wheels. Local, about 0.1 ms for each process of the host. Only the
standard library is imported: see quick.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from mpikv.common import proc

JOB = "_MPIKV_JOB"  # in every process of a job: "<job>/<role>-<number>"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
STEP_S = 0.02
# Of Open MPI 5, and 4, of MPICH, and of UCX below it
SEGMENT = re.compile(r" (/.*/(?:(?:sm|vader)_segment\.|mpich_shm_|ucx_shm_posix_)[^/\n]*)$", re.MULTILINE)
TERMINATE_S, KILL_S = 0.5, 3.0  # of `sweep`: whoever is still there has had its gentle signal before


@contextlib.contextmanager
def woken_by(signals: Iterable[signal.Signals]) -> Iterator[socket.socket]:
    """A socket that becomes readable when one of these signals comes, and has a byte with the number of each."""
    read_end, write_end = socket.socketpair()
    for end in (read_end, write_end):
        end.setblocking(False)
    old = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
    before = {signum: signal.signal(signum, lambda *_: None) for signum in signals}
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(old)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        read_end.close()
        write_end.close()


def die_with_parent(parent: int, signum: int) -> Callable[[], None]:
    """What a child of `parent` is to run before its program, so that it gets `signum` when the parent ends."""
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:  # it has ended in the meantime
            os.kill(os.getpid(), signum)

    return ask


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def state_and_parent(pid: int) -> tuple[str, int]:
    """The process's state (one letter, X where there is none) and its parent."""
    state, parent, *_ = proc.stat(pid) or ("X", "0")
    return state, int(parent)


def is_alive(pid: int) -> bool:
    """Whether it runs: an ended one may keep its entry for as long as nobody asks for its status."""
    return state_and_parent(pid)[0] not in "ZX"


def descendants(root: int) -> list[int]:
    parents = {pid: state_and_parent(pid) for pid in proc.pids()}
    found: list[int] = []
    level = {root}
    while level:
        level = {pid for pid, (_, parent) in parents.items() if parent in level}
        found += [pid for pid in level if parents[pid][0] not in "ZX"]
    return sorted(found)


def addressed(command: int) -> list[int]:
    """The processes that a signal for a command is meant for: it, and those of its process group that it has started.

    A process that has MPI loaded is the rank, and answers for its children: data loaders' workers are not among these.
    """
    parents = {pid: state_and_parent(pid)[1] for pid in proc.pids()}
    found: list[int] = []
    level = [command]
    while level:
        found += level
        above = {pid for pid in level if not is_rank(pid)}
        level = [pid for pid, parent in parents.items() if parent in above and _in_group(pid, command)]
    return found


def _in_group(pid: int, group: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid) == group
    return False


def is_rank(pid: int) -> bool:
    """Whether the process has an MPI library loaded."""
    return "/libmpi" in proc.text(f"{pid}/maps")


def of_job(job: str) -> list[int]:
    """The live processes that carry the job's id in their environment, but for this one. Another user's stay unseen."""
    mark = f"\0{JOB}={job}"
    return [pid for pid in proc.pids() if mark in "\0" + proc.text(f"{pid}/environ") and pid != os.getpid()]


def segments(pids: Iterable[int]) -> set[str]:
    """MPI's files of shared memory that processes have mapped.

    Open MPI's are 16 MiB for each rank, in /dev/shm unless set otherwise; `mpirun` removes them, and nobody does where
    it was killed. MPICH's is one for all ranks of a host, 1 MiB for each, and nobody removes it where a rank was
    killed. No other file: a program may have its data in /dev/shm.
    """
    return {path for pid in pids for path in SEGMENT.findall(proc.text(f"{pid}/maps"))}


def send(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def end_job(job: str, terminate_s: float = TERMINATE_S, kill_s: float = KILL_S) -> list[int]:
    """End what carries the job's id: SIGTERM, after `terminate_s` SIGKILL. Waits `terminate_s + kill_s` at most.

    Returns the processes that are still there.
    """
    left = of_job(job)
    for signum, limit_s in ((signal.SIGTERM, terminate_s), (signal.SIGKILL, kill_s)):
        deadline = time.monotonic() + limit_s
        send(left, signum)
        while (left := of_job(job)) and time.monotonic() < deadline:
            if signum == signal.SIGKILL:
                send(left, signum)  # those that were forked meanwhile
            time.sleep(STEP_S)
    return left


def sweep(arguments: Sequence[str]) -> int:
    """`quick.py sweep JOB [FOLDER]`, on another host: end what a job has left there, and remove the folder.

    Prints the processes that are still left, in JSON.
    """
    job, *folders = arguments
    if not re.fullmatch(r"[0-9a-f]{16,}", job):
        raise SystemExit(f"{job!r} is no job's id")
    left = end_job(job)
    if folders:
        import shutil  # noqa: PLC0415 - it takes milliseconds, which the process above every rank would pay

        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(left), flush=True)
    return 1 if left else 0


def run(words: Sequence[str], limit_s: float) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command that may hang."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s,
            check=False, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, "", f"no answer within {limit_s:g} s"
    except OSError as error:
        return 1, "", f"{words[0]}: {error.strerror}"
    return done.returncode, done.stdout, done.stderr
