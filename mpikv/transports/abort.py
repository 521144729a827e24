"""One rank's end is the job's end: what happens when a rank raises, exits early or is told to stop.

A rank that leaves by an exception or by `sys.exit(3)` while others wait would hang a plain `mpirun python x.py` for
ever: its interpreter goes on into MPI_Finalize, which waits for the others. So a distributed store installs here what
`python -m mpi4py` does, and more:

- an uncaught exception prints its traceback, each line with this rank and host, and aborts the job with status 1;
- `sys.exit` with a status is remembered; if the interpreter then ends with a store still open, the job ends with it;
- SIGTERM, which `mpirun` sends to the other ranks when one was killed, first prints what this rank was waiting for.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import Any

from mpikv.observe.activity import Activity
from mpikv.transports import launcher, printed, unmet
from mpikv.transports.forked import TakesSignals

FLUSH_S = 0.2  # mpirun has read what a rank printed; give it this long to pass it on before it is told to kill


class Guard(TakesSignals):
    """This process's hooks. Held by `sys.exit` itself, so that there is one per process and no module state."""

    def __init__(self, rank: int, size: int) -> None:
        self.label = f"rank {rank} of {size} on {socket.gethostname()}"
        self.exit_status = 0
        self._pid = os.getpid()
        self._before = sys.excepthook
        self._exit = sys.exit
        self.activities: list[Activity] = []  # of the stores that are open

    def install(self) -> None:
        """Replace `sys.excepthook` and `sys.exit`, and SIGTERM's default action."""
        sys.excepthook = self.excepthook
        sys.exit = self._remember_exit  # type: ignore[assignment] # it does not return either
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)

    def watch(self, activity: Activity) -> None:
        """A store of this process is open."""
        self.activities.append(activity)
        activity.others = lambda: [other for other in self.activities if other is not activity]

    def unwatch(self, activity: Activity) -> None:
        """It is closed."""
        if activity in self.activities:
            self.activities.remove(activity)

    def is_child(self) -> bool:
        """Whether this process was forked from the rank, as the workers of a data loader are: its end is its own."""
        return os.getpid() != self._pid

    def previous(self, number: int) -> signal.Handlers:
        """What SIGTERM did: it is the one signal that is taken, and from no other handler."""
        return signal.SIG_DFL

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the traceback with this rank in front of every line, and end the job."""
        if self.is_child():
            self._before(kind, error, trace)
            return
        self.fail("".join(traceback.format_exception(kind, error, trace)), 130 if kind is KeyboardInterrupt else 1)

    def fail(self, text: str, status: int = 1) -> None:
        """Print `text` with this rank in front of every line, and end the job with `status`."""
        self.say(text, status)
        abort(status)

    def say(self, text: str, status: int) -> None:
        """Print `text` before the job's end.

        The last line names the status: `mpikv launch` takes it for the cause of what becomes of the other ranks. All
        lines are one write: line by line, those of ranks that fail together would be mixed, and the first rank to be
        done would end the job in the middle of the others' lines.
        """
        sys.stdout.flush()
        lines = [*text.rstrip().splitlines(), f"ends the job with status {status}"]
        # torch.distributed collects what the hooks before its own print, and writes it when they return: this one never
        # does.
        stream = sys.stderr
        if isinstance(stream, io.StringIO) and sys.__stderr__ is not None:
            stream = sys.__stderr__
        stream.write("".join(f"[{self.label}] {line}\n" for line in lines))
        stream.flush()

    def _remember_exit(self, status: Any = None, /) -> None:
        if threading.current_thread() is not threading.main_thread():
            pass  # it ends that thread alone
        elif isinstance(status, int):
            self.exit_status = int(status) & 0xFF
        else:
            self.exit_status = 0 if status is None else 1
        self._exit(status)

    def _terminated(self, signum: int, _frame: FrameType | None) -> None:
        for activity in () if self.is_child() else self.activities:
            text = activity.waiting()
            if text is not None:
                # os.write: a handler may run inside another write to stderr, which forbids a second one.
                os.write(2, f"[{self.label}] was told to end (SIGTERM) while {text}\n".encode())
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def guard() -> Guard | None:
    """The guard of this process, if one is installed."""
    owner = getattr(sys.exit, "__self__", None)  # not `sys.excepthook`, which torch.distributed wraps into its own
    return owner if isinstance(owner, Guard) else None


def install(rank: int, size: int) -> Guard:
    """The guard of this process; the first call installs it."""
    present = guard()
    if present is None:
        present = Guard(rank, size)
        present.install()
    return present


def install_early(*, others_wait: bool) -> None:
    """An error before the ranks have met must still end the job, where MPI runs already or others wait in MPI_Init."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized():
        if not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
            install(mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
    elif others_wait and (started_by := launcher.find()) and started_by.size > 1:
        install(launcher.said_rank(os.environ), started_by.size)
        unmet.end_job_at_exit()  # also where the program catches the error: the others wait all the same


def fatal(error: BaseException) -> None:
    """A service of a progress engine failed. Other ranks need it, so the job ends; alone, the next wait raises it."""
    present = guard()
    if present is not None:
        present.fail("".join(traceback.format_exception(type(error), error, error.__traceback__)))


def abort(status: int) -> None:
    """End every process of the job with `status`."""
    printed.wait_until_read(FLUSH_S)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        unmet.end_job(status)
    elif not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(status)
    os._exit(status)
