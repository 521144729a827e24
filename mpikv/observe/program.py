"""Where a rank's program is, and what its process does: what other ranks cannot see of one that they wait for.

A rank answers for itself from the thread that moves its transfers on, which can look at the stack of the program's own
thread. Of a rank that does not answer, the operating system of its host still tells something.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from mpikv.common import proc

OWN = str(Path(__file__).resolve().parents[1]) + os.sep
# Not the user's program, where this is on the stack, too: the standard library and what was installed.
INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
POOLS = tuple(os.path.join(INSTALLED[0], name) for name in ("concurrent", "multiprocessing"))
GIVEN = (*INSTALLED[2:], *POOLS)  # where threads do what they are given: progress bars, data loaders, pools
MOST_FRAMES = 1000
STATES = {
    "R": "it computes without a break for other threads, as C code may",
    "S": "it sleeps in a call that lets no other thread run",
    "D": "it waits for a disk or for swapped memory",
    "T": "it was stopped by a signal (SIGCONT lets it go on)",
    "t": "a debugger has stopped it",
    "Z": "it has ended, and nobody has noticed",
}
UNASKED = {**STATES, "R": "it computes", "S": "it sleeps, or waits"}  # of a process that is not expected to answer
GONE = "its process is gone"
ENDED = (GONE, STATES["Z"])
COMPUTES = 0.1  # of the time: who polls takes less, and who computes beside others on a busy machine takes more
FIELDS_BEFORE = 3  # of proc_pid_stat(5), before those that are read here: pid, name and state
_frames_lock = threading.Lock()  # who finds the collection off must not leave it so
LEAST_S, MOST_S = 0.1, 5.0  # between two looks at a thread: the system counts in hundredths of a second
TAKEN = slice(14 - FIELDS_BEFORE, 16 - FIELDS_BEFORE)  # processor time in the program and in the system, in clock ticks
STARTED = 22 - FIELDS_BEFORE  # when the process began, in clock ticks since boot


class Process(NamedTuple):
    """A process of a job. started: tells it from a later one with its number; "" where there is no /proc."""

    host: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"pid {self.pid}"


class WorkerStatus(NamedTuple):
    """What a worker does. seen_s: how long ago it has answered last, None: never. doing: as errors say it."""

    rank: int
    host: str
    pid: int
    alive: bool
    seen_s: float | None
    doing: str

    @property
    def name(self) -> str:
        return f"worker {self.rank} on {self.host}"


def this_process() -> Process:
    return Process(socket.gethostname(), os.getpid(), _stat(os.getpid())[1])


def state_of(process: Process, states: Mapping[str, str] = STATES) -> str:
    """Return what a process of this host does, in words; "" where that is not known. states: UNASKED, where nobody has
    asked the process itself.
    """
    if process.host != socket.gethostname() or not process.started:
        return ""
    letter, started = _stat(process.pid)
    return GONE if started != process.started else states.get(letter, "")


def position(thread: int) -> str:
    """Return where the program is in a thread, by its identifier: 'train.py:41 in main'; "" where that has ended.

    It is the innermost place in the user's own files; where none of these is on the stack, in any file but this
    package's.
    """
    return _users(thread)[0]


def in_package(thread: int) -> bool:
    """Return whether that place has called this package, and waits for it to return."""
    return _users(thread)[1]


def alone(thread: int) -> bool:
    """Return whether no other thread of this process may do something of its own accord.

    Not counted are this package's threads, and those without the user's files and calls of this package in which an
    installed package or a pool of workers waits for what it is given: they come to nothing while all others wait.
    """
    own = {one.ident for one in threading.enumerate() if one.name.startswith("mpikv-")} | {thread}
    with _uncollected():
        frames = [frame for ident, frame in sys._current_frames().items() if ident not in own]  # noqa: SLF001
        stacks = [[one.f_code.co_filename for one in _outwards(frame)] for frame in frames]
    return all(
        any(file.startswith(GIVEN) for file in files)
        and all(file.startswith(("<frozen", *INSTALLED)) and not file.startswith(OWN) for file in files)
        for files in stacks
    )


def _users(thread: int) -> tuple[str, bool]:
    """The place of `position`, and whether there are frames of this package inside of it."""
    outside, own = "", False
    with _uncollected():
        for frame in _outwards(sys._current_frames().get(thread)):  # noqa: SLF001 - documented, "for debuggers"
            file = frame.f_code.co_filename
            if file.startswith(OWN):
                own = True
            if file.startswith((OWN, "<frozen")):
                continue
            place = f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
            outside = outside or place
            if not file.startswith(INSTALLED):
                return place, own
    return outside, own


@contextmanager
def _uncollected() -> Iterator[None]:
    """A block without a garbage collection, in which the frames of other threads can be looked at.

    Until CPython 3.12 one of its locks is held while it lists them, and where what is freed lets other threads run, as
    a closed file does, these wait for that lock for ever (python/cpython#106883). And whoever goes from frame to frame
    makes objects, and must not find other frames than before because a finalizer has let their thread run.
    """
    with _frames_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


class ThreadLoad:
    """Whether a thread of this process computes: by the processor time that it has taken since the last look.

    native_id: the system's number of the thread.
    """

    def __init__(self, native_id: int) -> None:
        self._native_id = native_id
        self._at_s, self._taken_s = -math.inf, 0.0

    def computes(self, now_s: float) -> bool | None:
        """Return whether it has computed since the last look, or where that was just now, or long ago, does now.

        None where nobody knows.
        """
        fields = proc.stat(f"self/task/{self._native_id}")
        if not fields:
            return None
        taken_s = sum(map(int, fields[TAKEN])) / os.sysconf("SC_CLK_TCK")
        passed_s, more_s = now_s - self._at_s, taken_s - self._taken_s
        if passed_s >= LEAST_S:
            self._at_s, self._taken_s = now_s, taken_s
        return more_s > COMPUTES * passed_s if LEAST_S <= passed_s <= MOST_S else fields[0] == "R"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _stat(which: int | str) -> tuple[str, str]:
    """The state and the start of a process; twice "" where there is none."""
    fields = proc.stat(which)
    return (fields[0], fields[STARTED]) if fields else ("", "")
