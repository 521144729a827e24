"""One rank's end is the job's end: what happens when a rank raises, exits early or is told to stop.

A rank that leaves by an exception or by `sys.exit(3)` while others wait would hang a plain `mpirun python x.py` for
ever: its interpreter goes on into MPI_Finalize, which waits for the others. So a distributed store installs here what
`python -m mpi4py` does, and more:

- an uncaught exception prints its traceback, each line with this rank and host, and aborts the job with status 1;
- a mistake in a call (see tracebacks.py) prints one line, and ends the job with status 2;
- the status of `sys.exit`, `exit` and `quit` is remembered; if the interpreter then ends with a store still open, the
  job ends with it (that of a bare `raise SystemExit(3)` cannot be: Python shows it to nobody before its exit handlers);
- SIGTERM, which `mpirun` sends to the other ranks when one was killed, first prints what this rank was waiting for.

Ranks run the same program, so that most errors are made by all of them. Rank 0 prints its own at once, and the others
wait for their turn: rank 0's end is theirs. So one rank prints, without a message between them, and a rank whose error
is its own prints it two or three seconds later. MPI_Abort has the library print a box of its own, so that a mistake
ends the process instead where `mpirun` takes that for the end of the job, and hydra is asked by itself (see unmet.py).
"""

from __future__ import annotations

import atexit
import builtins
import functools
import io
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

from mpikv.config import wants_full_tracebacks
from mpikv.observe import program
from mpikv.observe.activity import Activity
from mpikv.observe.stall import Waiting
from mpikv.runtime import launcher, library, printed, tracebacks, unmet
from mpikv.runtime.forked import TakesSignals

FLUSH_S = 0.2  # mpirun has read what a rank printed; give it this long to pass it on before it kills
# From an error that all ranks make at once to the end of all by rank 0's: the launcher's time to hear of it (hydra's
# processes, see unmet.py: 1 s) and to end the others (`mpikv launch` leaves them 1 s for last words).
TURN_S = 2.5
BETWEEN_S = 0.3  # from one rank's turn to the next one's
LONGEST_TURN_S = 4.0  # however many ranks there are
LONGEST_REASON = 200  # characters of an error that others are told
MISTAKE = 2  # the status, as argparse has it

Call = TypeVar("Call", bound=Callable[..., Any])
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]  # sys.excepthook


class Guard(TakesSignals):
    """The hooks of this process.

    `sys.exit` itself holds them, so that there is one Guard per process and no module state.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self.label = f"rank {rank} of {size} on {socket.gethostname()}"
        self.exit_status = 0
        self.step: Callable[[], int] | None = None  # after which the training is
        self._pid = os.getpid()
        self._before = sys.excepthook
        self._exit = sys.exit
        self.activities: list[Activity] = []  # of the stores that are open, and of making one
        self._creations: Counter[tuple[int, ...]] = Counter()  # how often ranks have made a store together
        self._creating = Activity(store="kv.create", me=self.label)
        self._creating.reached = self._created
        self.watch(self._creating)

    def install(self) -> None:
        """Replace `sys.excepthook`, `sys.exit`, `exit` and `quit`, and SIGTERM's default action."""
        sys.excepthook = self.excepthook
        sys.exit = self._remember_exit  # type: ignore[assignment] # it does not return either
        for name in {"exit", "quit"} & vars(builtins).keys():  # without the module `site` there are none
            setattr(builtins, name, Quitter(self._note, getattr(builtins, name)))
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)

    def watch(self, activity: Activity) -> None:
        """Note that a store of this process is open."""
        self.activities.append(activity)
        activity.others = lambda: [other for other in self.activities if other is not activity]
        activity.alone = program.alone

    def unwatch(self, activity: Activity) -> None:
        if activity in self.activities:
            self.activities.remove(activity)

    @contextmanager
    def creating(self, call: str, ranks: Sequence[int]) -> Iterator[None]:
        """A block in which this rank waits for all `ranks`, of COMM_WORLD, to make a call for the first time."""
        self._creations[tuple(ranks)] += 1
        need = Waiting(call, agreed=("create", [[*ranks], self._creations[tuple(ranks)]]))
        with self._creating.during(call, [need]):
            yield

    def _created(self, item: Any) -> int:
        ranks, n = item[1]
        return int(self._creations[tuple(ranks)] >= n) if self._rank in ranks else -1

    def is_child(self) -> bool:
        """Return whether this process was forked from the rank, as a data loader's workers are: its end is its own."""
        return os.getpid() != self._pid

    def previous(self, number: int) -> signal.Handlers:
        """Return what SIGTERM did before: it is the one signal that these hooks take, and only if it had no handler."""
        return signal.SIG_DFL

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.is_child():
            self._before(kind, error, trace)
        elif kind is KeyboardInterrupt:
            self.say(tracebacks.folded(error), 130)
            abort(130)
        else:
            self.tell(error.with_traceback(trace))

    def tell(self, error: BaseException) -> None:
        self._note_end(f"{type(error).__name__}: {error}")
        found = None if wants_full_tracebacks() else tracebacks.mistake(error)
        if found is None:
            self.fail(tracebacks.full(error) if wants_full_tracebacks() else tracebacks.folded(error))
            return
        self._wait_for_turn()
        self._print(f"mpikv: error: [{self.label}] {found}\n")
        abort(MISTAKE, quietly=True)

    def fail(self, text: str, status: int = 1) -> None:
        """Print `text` with this rank in front of every line, and end the job with `status`."""
        self._note_end(text)
        if not wants_full_tracebacks():
            self._wait_for_turn()
        self.say(text, status)
        abort(status)

    def _note_end(self, why: str) -> None:
        """Let those who ask meanwhile know it. The first reason counts."""
        for activity in self.activities:
            activity.ending = activity.ending or why.partition("\n")[0][:LONGEST_REASON]

    def end_if_failed(self, what: str) -> None:
        """End the job at the interpreter's exit, where the program has failed while something of it was open."""
        if self.exit_status:
            self.fail(f"sys.exit({self.exit_status}) while {what}", self.exit_status)
        error = getattr(sys, "last_value", None)  # Python sets it before it calls a hook
        if error is not None and not (hasattr(sys, "ps1") or sys.flags.inspect):
            hook = sys.excepthook
            name = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
            text = f"{type(error).__name__}: {error}; sys.excepthook was replaced by {name}, which ends no job"
            self.fail(f"{text}, while {what}", 130 if isinstance(error, KeyboardInterrupt) else 1)

    def _wait_for_turn(self) -> None:
        """Wait while ranks before this one print the same error; their end of the job ends this process meanwhile."""
        if self._rank > 0:
            if not is_running():
                unmet.meet()  # rank 0 cannot end the others before
            time.sleep(min(TURN_S + BETWEEN_S * (self._rank - 1), LONGEST_TURN_S))

    def say(self, text: str, status: int) -> None:
        """Print `text` before the job's end.

        The last line names the status: `mpikv launch` reads there what the cause was, and what became of the other
        ranks follows from it. All lines are one write: line by line, those of ranks that fail together would be mixed,
        and the first rank that has printed its own would end the job in the middle of the others' lines.
        """
        after = "" if self.step is None else f" after step {self.step()}"
        lines = [*text.rstrip().splitlines(), f"ends the job with status {status}{after}"]
        self._print("".join(f"[{self.label}] {line}\n" for line in lines))

    def _print(self, text: str) -> None:
        sys.stdout.flush()
        # torch.distributed collects what the hooks before its own print, and writes it when they return: this one never
        # does.
        stream = sys.stderr
        if isinstance(stream, io.StringIO) and sys.__stderr__ is not None:
            stream = sys.__stderr__
        stream.write(text)
        stream.flush()

    def _remember_exit(self, status: Any = None, /) -> None:
        self._note(status)
        self._exit(status)

    def _note(self, status: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            pass  # it ends that thread alone
        elif isinstance(status, int):
            self.exit_status = int(status) & 0xFF
        else:
            self.exit_status = 0 if status is None else 1

    def _terminated(self, signum: int, _frame: FrameType | None) -> None:
        for activity in () if self.is_child() else self.activities:
            text = activity.waiting()
            if text is not None:
                # os.write: a handler may run inside another write to stderr, which forbids a second one.
                os.write(2, f"[{self.label}] was told to end (SIGTERM) while {text}\n".encode())
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


class Quitter:
    """`exit` or `quit` of the module `site`, with its status noted."""

    def __init__(self, note: Callable[[Any], None], before: Callable[[Any], None]) -> None:
        self._note, self._before = note, before

    def __repr__(self) -> str:
        return repr(self._before)

    def __call__(self, code: Any = None) -> None:
        self._note(code)
        self._before(code)


def guard() -> Guard | None:
    owner = getattr(sys.exit, "__self__", None)  # not `sys.excepthook`, which torch.distributed wraps into its own
    return owner if isinstance(owner, Guard) else None


def install(rank: int, size: int) -> Guard:
    """Return the guard of this process; the first call installs it."""
    present = guard()
    if present is None:
        present = Guard(rank, size)
        present.install()
    return present


def install_early(*, others_wait: bool) -> None:
    """Let an error end the job before the ranks have made a store, if MPI runs already or others wait in MPI_Init."""
    mpi = sys.modules.get("mpi4py.MPI")
    if launcher.is_child_of_rank():
        pass  # its end is its own
    elif mpi and mpi.Is_initialized():
        if not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
            install(mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
            return
    elif (started_by := launcher.find()) and started_by.size > 1:
        install(launcher.said_rank(os.environ), started_by.size)
        if others_wait:
            unmet.end_job_at_exit()  # also where the program catches the error: the others wait all the same
        return
    install_alone()


def install_alone() -> None:
    """Install the hook of a process without other ranks, unless it has one."""
    if getattr(sys.excepthook, "func", None) is not _tell_alone:
        sys.excepthook = functools.partial(_tell_alone, sys.excepthook)


def _tell_alone(before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The hook of a process without other ranks: a mistake is one line there, too, and ends the program with its
    status. Other errors go to the hook `before`.
    """
    at_a_prompt = hasattr(sys, "ps1") or sys.flags.inspect
    found = None if wants_full_tracebacks() or at_a_prompt else tracebacks.mistake(error.with_traceback(trace))
    if found is None:
        before(kind, error, trace)
        return
    print(f"mpikv: error: {found}", file=sys.stderr, flush=True)
    raise SystemExit(MISTAKE)  # Python ends the program as if it had said so, with what is to be done at its exit


def at_end(close: Callable[[], None], what: Callable[[], str]) -> Callable[[], None]:
    """Call `close` when the interpreter ends or, before that, when the program calls MPI.Finalize().

    Where the program has failed, the job ends instead, if `what()` says what was open. Returns what takes this back.
    """
    mpi, pid = sys.modules["mpi4py.MPI"], os.getpid()
    ending = False

    def end(*_: Any) -> None:
        nonlocal ending
        if ending or os.getpid() != pid:
            return  # done, or a child that was forked: what is open is its parent's
        ending, present = True, guard()
        if present is not None and (open_now := what()):
            present.end_if_failed(open_now)
        try:
            close()
        except BaseException as error:  # also Ctrl-C: the others wait in close
            if present is None:
                raise
            present.excepthook(type(error), error, error.__traceback__)

    def undo() -> None:
        atexit.unregister(end)
        if not ending:
            mpi.COMM_SELF.Delete_attr(key)
            mpi.Comm.Free_keyval(key)  # which would keep what is closed

    atexit.register(end)
    key = mpi.Comm.Create_keyval(delete_fn=end)
    mpi.COMM_SELF.Set_attr(key, what)  # MPI_Finalize deletes it before it does anything else (MPI 4.1, 11.2.4)
    return undo


def tells(call: Call) -> Call:
    """Decorate a public call that may come before a store is made, so that its errors are printed as a store's."""

    @functools.wraps(call)
    def call_and_tell(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception:
            install_early(others_wait=False)
            raise

    return call_and_tell  # type: ignore[return-value] # it is called as `call` is


def fatal(error: BaseException) -> None:
    """End the job, since a service of a progress engine failed that other ranks need.

    In a process without other ranks the next wait raises the error.
    """
    present = guard()
    if present is not None:
        present.tell(error)


def _mpi() -> Any:
    return sys.modules["mpi4py.MPI"]


def is_running() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


def _is_last() -> bool:
    """Whether all other ranks have died: then Open MPI 5.0.11 ends with status 0 after MPI_Abort, whatever it was."""
    if _mpi().Is_finalized() or library.describe().fault_tolerance != "on":
        return False
    world = _mpi().COMM_WORLD
    n_failed: int = world.Get_failed().Get_size()
    return n_failed > 0 and n_failed == world.Get_size() - 1


def abort(status: int, *, quietly: bool = False) -> None:
    """End every process of the job with `status`. quietly: without the library's own words, where that is possible."""
    printed.wait_until_read(FLUSH_S)
    by_exit = quietly and launcher.ends_jobs()
    if not is_running():
        unmet.end_job(status, by_exit=by_exit)
    elif not (by_exit or _is_last() or (quietly and unmet.tell_hydra(status)) or _mpi().Is_finalized()):
        _mpi().COMM_WORLD.Abort(status)
    os._exit(status)
