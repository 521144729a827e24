"""Where a rank's program is, and what its process does: what other ranks cannot see of one that they wait for.

A rank answers for itself from the thread that moves its transfers on, which can look at the stack of the program's own
thread. Of a rank that does not answer, the operating system of its host still tells something.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

OWN = str(Path(__file__).resolve().parents[1]) + os.sep
# Not the user's program, where this is on the stack, too: the standard library and what was installed.
INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
STATES = {
    "R": "it computes without a break for other threads, as C code may",
    "S": "it sleeps in a call that lets no other thread run",
    "D": "it waits for a disk or for swapped memory",
    "T": "it was stopped by a signal (SIGCONT lets it go on)",
    "t": "a debugger has stopped it",
    "Z": "it has ended, and nobody has noticed",
}
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
        """How errors name it: 'worker 1 on node7'."""
        return f"worker {self.rank} on {self.host}"


def this_process() -> Process:
    """Return this process, as other ranks may ask for it."""
    return Process(socket.gethostname(), os.getpid(), _stat(os.getpid())[1])


def state_of(process: Process) -> str:
    """Return what a process of this host does, in words; "" where that is not known.

    >>> from mpikv.observe.program import Process, state_of, this_process
    >>> state_of(this_process())
    'it computes without a break for other threads, as C code may'
    >>> state_of(Process(this_process().host, 1 << 30, '5'))
    'its process is gone'
    """
    if process.host != socket.gethostname() or not process.started:
        return ""
    letter, started = _stat(process.pid)
    return GONE if started != process.started else STATES.get(letter, "")


def position(thread: int) -> str:
    """Return where the program is in a thread, by its identifier: 'train.py:41 in main'; "" where that has ended.

    It is the innermost place in the user's own files; where none of these is on the stack, in any file but this
    package's.
    """
    frame, _ = _users(thread)
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def in_package(thread: int) -> bool:
    """Return whether that place has called this package, and waits for it to return."""
    return _users(thread)[1]


def _users(thread: int) -> tuple[FrameType | None, bool]:
    """The frame of `position`, and whether there are frames of this package inside of it."""
    innermost = _frames().get(thread)
    outside, own = None, False
    for frame in itertools.islice(_outwards(innermost), 1000):
        file = frame.f_code.co_filename
        if file.startswith(OWN):
            own = True
        if file.startswith((OWN, "<frozen")):
            continue
        outside = outside or frame
        if not file.startswith(INSTALLED):
            return frame, own
    return outside, own


def _frames() -> dict[int, FrameType]:
    """The innermost frame of each thread.

    Without a garbage collection meanwhile: until CPython 3.12 one of its locks is held then, and where what is freed
    lets other threads run, as a closed file does, these wait for that lock for ever (python/cpython#106883).
    """
    with _frames_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()  # noqa: SLF001 - documented, "for debuggers"
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
        fields = _fields(f"self/task/{self._native_id}")
        if not fields:
            return None
        taken_s = sum(map(int, fields[TAKEN])) / os.sysconf("SC_CLK_TCK")
        passed_s, more_s = now_s - self._at_s, taken_s - self._taken_s
        if passed_s >= LEAST_S:
            self._at_s, self._taken_s = now_s, taken_s
        return more_s > COMPUTES * passed_s if LEAST_S <= passed_s <= MOST_S else fields[0] == "R"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _stat(which: int | str) -> tuple[str, str]:
    """The state and the start of a process; twice "" where there is none."""
    fields = _fields(which)
    return (fields[0], fields[STARTED]) if fields else ("", "")


def _fields(which: int | str) -> list[str]:
    """What proc_pid_stat(5) has of a process or a thread, from its state on; [] where there is none."""
    try:
        text = Path(f"/proc/{which}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name before may hold anything
