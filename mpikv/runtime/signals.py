"""Signals that ask a program to stop after its step.

A batch system sends a signal some time before it ends a job, to one rank or to all. The handler only notes it, since it
may run in the middle of anything; the store's own calls and its progress engine look at the note.

- A handler of the program's own is called as well, so nothing that it did is lost: one set before, and one that the
  program or a library sets later, which is found when the program reads `stop_requested`. What only ends a process (the
  default action, a distributed store's report of what a rank was waiting for) is put off.
- SIGTERM, or another signal that is meant to end a program, does what it would do without this when it comes again
  `AGAIN_S` or more after the first time: whoever sends it twice does not want to wait. Sooner, it is the same request,
  which several launchers have delivered. Others, SIGUSR1 above all, are the same request however often they come.
- A signal that is sent before there are handlers comes to nobody. Who sends one then makes a file first, `asked`, which
  `install` looks for when the handlers are there.
- After all workers have stopped, the handlers stay, and while the interpreter ends the signals are ignored: a rank that
  is signalled a little later than the others must not die of it, and take the job's status 0 with it.
- Launchers send a signal to a rank and all that it has started. What the rank still needs for its last step, such as
  data loaders' workers, is spared by signals that are not meant to end a program: they are blocked in every thread but
  one of ours, so that a started process begins with them blocked, and a forked one ignores them. SIGTERM and its like
  do to a child what they would do without this, since that is how its parent ends it (docs/adr/0050).
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType

from mpikv.runtime.abort import Guard
from mpikv.runtime.forked import Handler, TakesSignals, takers

TAKEN_S = 10.0  # a thread that waits for nothing else gets a core sooner, on a busy machine too
AGAIN_S = 1.0  # a scheduler and mpirun deliver the same request within milliseconds; a person's second one comes later

ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}


class StopSignals(TakesSignals):
    """Handlers of some signals, from `install` until `restore`.

    names: without SIG, as in ('TERM', 'USR1'). asked: a file that asks, too, if it is there at `install`.
    """

    def __init__(self, names: Sequence[str], asked: str = "") -> None:
        self._asked = asked
        self._numbers = [signal.Signals[f"SIG{name}"] for name in names]
        self._before: dict[int, Handler] = {}
        self._first_s: dict[int, float] = {}
        self._pid = os.getpid()
        self._why: str | None = None
        self._installed = self._ended = False
        self.kept_off = set()
        self._over = threading.Event()
        self._receiver: threading.Thread | None = None

    def install(self) -> None:
        """Take the signals over. Only the main thread can; in another it is a RuntimeWarning, and nothing changes."""
        if not self._numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in self._numbers)
            warnings.warn(
                f"kv.create was not called in the main thread, so this rank cannot listen to {names} "
                "(MPIKV_STOP_SIGNALS); it stops when another rank was asked to",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        self._installed = True
        by_program = signal.pthread_sigmask(signal.SIG_BLOCK, ()) - _kept_off(self._numbers)
        for number in self._numbers:
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._handle)
        self.kept_off |= {number for number in self._numbers if number not in ENDING | by_program}
        if self.kept_off:
            self._receiver = threading.Thread(target=self._receive, daemon=True, name="mpikv-signals")
            self._receiver.start()
            signal.pthread_sigmask(signal.SIG_BLOCK, self.kept_off)
        if self._asked and os.path.exists(self._asked):
            self._why = self._why or signal.SIGUSR1.name  # which is what batch scripts send
        atexit.register(self._at_exit)

    def _receive(self) -> None:
        """Be the thread that these signals come to. Python runs their handlers in the main thread all the same."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.kept_off)
        self._over.wait()

    def why(self) -> str | None:
        """Return the signal that came, as in 'SIGTERM'; None if none has come so far."""
        # Not when they are ignored: Python would give back to the default action, in its end, what has a handler then.
        if self._installed and not self._ended and threading.current_thread() is threading.main_thread():
            for number in self._before:
                if self not in (getattr(taker, "stop", taker) for taker in takers(number)):
                    signal.signal(number, SetLater(self, signal.getsignal(number)).handle)
        return self._why

    def restore(self) -> None:
        """Give the signals back, unless the program has set handlers of its own meanwhile. Idempotent."""
        until_s = time.monotonic() + TAKEN_S
        while signal.sigpending() & self.kept_off and time.monotonic() < until_s:
            time.sleep(0.001)  # one that was sent before this has not come to its thread yet: it would end the process
        self._over.set()
        if self._receiver is not None:
            self._receiver.join()
        self._installed = False
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread can: the handlers stay, and pass signals on
        for number in self._before:
            for taker in takers(number):
                stop = getattr(taker, "stop", taker)
                if not isinstance(stop, StopSignals) or stop._installed:  # noqa: SLF001 - of the same class
                    break
                before = taker.previous(number)
                signal.signal(number, signal.SIG_DFL if before is None else before)  # None: set by C, out of reach
        kept_off = set(self.kept_off)
        self.kept_off.clear()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, kept_off - _kept_off(kept_off))

    def end(self) -> None:
        """Ignore the signals from now on, since the process ends; but leave handlers of the program's own."""
        self._ended = True
        for number, before in self._before.items():
            now = signal.getsignal(number)
            if now == self._handle or (now == before and (not callable(now) or _ends(now))):
                signal.signal(number, signal.SIG_IGN)

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.end()

    def previous(self, number: int) -> Handler:
        """Return the action that a signal would have without this object, and without others restored since."""
        before = self._before[number]
        owner = getattr(before, "__self__", None)
        while isinstance(owner, StopSignals) and not owner._installed:  # noqa: SLF001 - of the same class
            before = owner._before[number]  # noqa: SLF001 - of the same class
            owner = getattr(before, "__self__", None)
        return before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pass_on(number, frame, self.previous(number))

    def pass_on(self, number: int, frame: FrameType | None, before: Handler) -> None:
        """Note that the signal has come, and call what would have had it without this object."""
        now_s = time.monotonic()
        again = number in ENDING and now_s - self._first_s.setdefault(number, now_s) >= AGAIN_S
        put_off = self._installed and not again and os.getpid() == self._pid
        if put_off:
            self._why = self._why or signal.Signals(number).name
        if callable(before) and not (put_off and _ends(before)):
            before(number, frame)
        elif not put_off and not callable(before) and before is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class SetLater(TakesSignals):
    """Takes the place of a handler that somebody has set over the one of `stop`, and may give back."""

    def __init__(self, stop: StopSignals, handler: Handler) -> None:
        self.stop, self._handler = stop, handler
        self.kept_off = stop.kept_off

    def previous(self, number: int) -> Handler:
        return self._handler

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.stop.pass_on(number, frame, self._handler)


def _kept_off(numbers: Iterable[int]) -> set[int]:
    """Return those of the signals that a store keeps off children."""
    return {number for number in numbers for taker in takers(number) if number in taker.kept_off}


def _ends(handler: Handler) -> bool:
    """Return whether a handler only ends the process, perhaps with some words."""
    return isinstance(getattr(handler, "__self__", None), Guard) or handler is signal.default_int_handler
