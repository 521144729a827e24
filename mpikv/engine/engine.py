"""The progress engine: moves every transfer of one store on, and waits without spinning.

Collectives, server loops and pulls are generators that yield each request they must wait for. `Engine.start` makes a
`Running` of a generator, which is itself a request; `Engine.step` resumes the generators whose request is done. Neither
Open MPI nor MPICH moves a message on by itself while Python computes, so a thread of the engine steps whenever no
caller does. A thread holds one lock while it steps, so all MPI calls of a store come from one thread at a time.

Some requests wake the generator that waits for them (`Waking`): the engine leaves such a generator alone until it has
been woken, and then finds it in a queue. The others it asks in every step.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from mpikv.common.clock import MACHINE_CLOCK, Clock
from mpikv.engine.backoff import Backoff, wait_until
from mpikv.engine.operation import Operation, Steps
from mpikv.engine.running import Running
from mpikv.errors import MpikvError

T = TypeVar("T")

# Beside Python code that computes, the engine waits so long for the interpreter's lock each time: after a nap and after
# each call of MPI and each addition, which give it up. With Python's own 5 ms most of a link stays idle.
BUSY_SWITCH_S = 0.5e-3
BUSY_NAP_S = 2e-3  # beside a program that computes: a link has much longer to do, and each wake-up takes 30 us from it
PARKED_S = 50e-3  # while a caller does the work
STOP_S = 60.0  # the thread ends after its step, in which MPI, a codec or an optimizer may never return
MOST_FAILED = 16  # transfers whose errors are kept for `close`, with all that their tracebacks refer to
IDLE_NAP_S = 2e-3  # 500 wake-ups of about 10 us each: half a percent of a core


class Lock:
    """A lock that its holder may take again. around: a context that its holder is in, and that may be entered again."""

    def __init__(self, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self._lock = threading.RLock()
        self._around = around
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            context = self._around()
            context.__enter__()
        except BaseException:
            self._lock.release()
            raise
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        try:
            self._entered.pop().__exit__(*error)
        finally:
            self._lock.release()


class Engine:
    """Moves the transfers of one store on.

    threaded: whether a thread steps while no caller does; needs an MPI library with THREAD_MULTIPLE. on_fatal: called
    with the exception when a service ends by one. poll: called in each step; it finds out what is done, and wakes
    whoever waits for that; usually a transport's. around: a context for whoever holds the lock: a GPU's stream.
    """

    def __init__(
        self,
        *,
        threaded: bool,
        on_fatal: Callable[[BaseException], None],
        poll: Callable[[], None] = lambda: None,
        clock: Clock = MACHINE_CLOCK,
        around: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._poll, self.clock, self._around, self._on_fatal = poll, clock, around, on_fatal
        # Held by a thread while it steps; to be taken to read or change what generators read or change.
        self.lock: threading.RLock | Lock = threading.RLock() if around is None else Lock(around)
        self._rung = threading.Event()  # ends the naps of who waits for a GPU
        self._running: dict[Running[Any], None] = {}  # in the order of their start
        self._woken: deque[Running[Any]] = deque()
        self._asked: dict[Running[Any], None] = {}
        self._services: list[Running[Any]] = []
        self._callers = 0  # threads inside `wait`, which step by themselves
        self._wake = threading.Event()
        self.stopped = False
        self.waker: Any = None  # where others of this host can wake this rank (waker.py)
        self.serves = False  # they expect answers while no caller waits
        self.failure: BaseException | None = None  # what ended a service, or was interrupted; later waits raise it
        self.failed: list[Running[Any]] = []  # the first that `start` has begun and that ended by an error
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._loop, name="mpikv-progress", daemon=True)
            self._thread.start()

    def start(self, steps: Steps[T], name: str) -> Running[T]:
        """Start a generator, and run it until it has to wait for the first time."""
        return self.take(Running(steps, name, started=True))

    def take(self, running: Running[T]) -> Running[T]:
        """Move a generator on that was begun without an engine, as `start` does."""
        with self.lock:
            running.queue = self._woken
            self._running[running] = None
            try:  # as `_move_on` does, with two functions less between a call and the transport
                running.advance()
            except BaseException as error:
                self.interrupted(running.name, error)
                raise
            self._note(running)
            if not running.done:
                self._wake.set()
                if self.serves and self.waker is not None:
                    self.waker.wake_self()
        return running

    def take_next(self, running: Running[Any]) -> Running[Any]:
        """As `take`, but begin the generator in the next step."""
        with self.lock:
            running.queue = self._woken
            self._running[running] = None
            self._woken.append(running)
            self._wake.set()
        return running

    def serve(self, steps: Steps[Any], name: str) -> Running[Any]:
        """Start a generator that runs beside the others until it ends or the engine stops."""
        running = Running(steps, name)
        with self.lock:
            self._services = [service for service in self._services if not service.done] + [running]
            self._wake.set()
        return running

    def step(self) -> bool:
        """Resume every generator that can go on. Returns whether anything moved."""
        with self.lock:
            moved = False
            self._poll()
            for running in self._services:
                moved |= self._advance(running)
                if running.error is not None:
                    self._services.remove(running)
                    self.failure = self.failure or running.error
                    self._on_fatal(running.error)
                    break  # the others are moved on by the next step
            for running in tuple(self._asked):
                moved |= self._move_on(running)
            for _ in range(len(self._woken)):  # who is woken meanwhile has its turn in the next step
                moved |= self._move_on(self._woken.popleft())
            return moved

    def _advance(self, running: Running[Any]) -> bool:
        try:
            return running.advance()
        except BaseException as error:  # Ctrl-C: `advance` raises nothing else
            self.interrupted(running.name, error)
            raise

    def _move_on(self, running: Running[Any]) -> bool:
        moved = self._advance(running)
        self._note(running)
        return moved

    def _note(self, running: Running[Any]) -> None:
        """Note, after a generator was resumed, whether it has to be asked in every step. Not for services."""
        if running.done:
            self._running.pop(running, None)
            if running.started and running.error is not None and len(self.failed) < MOST_FAILED:
                self.failed.append(running)
        if running.asked and not running.done:
            self._asked[running] = None
        else:
            self._asked.pop(running, None)

    def fail(self, error: BaseException) -> None:
        """Let every later wait raise this: something that other ranks count on was lost."""
        self.failure = self.failure or error

    def interrupted(self, name: str, error: BaseException) -> None:
        """Let every later wait fail: an interrupt has hit a transfer that other ranks count on, and it is lost."""
        self.fail(
            MpikvError(
                f"{type(error).__name__} has interrupted a transfer half-way ({name}), and the other workers count on "
                "this worker's part of it: this store can be used no more"
            )
        )

    def wait(
        self,
        request: Operation,
        timeout_s: float,
        on_timeout: Callable[[], BaseException],
        check: Callable[[], None] | None = None,
    ) -> None:
        """Block until `request` is done. Raises its error, what `check` raises, or `on_timeout()` when time is up."""

        def test() -> bool:
            with self.lock:
                if self.failure is not None:
                    raise self.failure
                if request.test():
                    return True
                if check is not None:
                    check()
                return False

        with self.lock:
            self._callers += 1
        try:
            wait_until(test, self.step, timeout_s, on_timeout, sleep=self._nap(), clock=self.clock)
        finally:
            with self.lock:
                self._callers -= 1
                if self._running:
                    self._wake.set()

    def ring(self) -> None:
        """Look again now: a GPU has done something. From any thread."""
        self._rung.set()
        self._wake.set()
        if self.waker is not None:
            self.waker.wake_self()

    def _sleep_until_rung(self, seconds: float) -> None:
        self._rung.wait(seconds)
        self._rung.clear()

    def _nap(self) -> Callable[[float], Any] | None:
        """How to sleep so that what comes meanwhile ends it; None: nothing can."""
        if self.waker is not None:
            return self.waker.sleep  # type: ignore[no-any-return]
        return None if self._around is None else self._sleep_until_rung

    def _loop(self) -> None:
        with nullcontext() if self._around is None else self._around():
            self._work()

    def _work(self) -> None:
        backoff = Backoff(IDLE_NAP_S, clock=self.clock)
        usual_s = None  # the user's switch interval, while ours is in force
        while not self.stopped:
            with self.lock:
                busy = bool(self._running) and self._callers == 0
            if busy and sys.getswitchinterval() > BUSY_SWITCH_S:
                usual_s = sys.getswitchinterval()
                sys.setswitchinterval(BUSY_SWITCH_S)
            elif not busy and usual_s is not None:
                sys.setswitchinterval(usual_s)
                usual_s = None
            if self._callers == 0 and self.step():
                backoff.reset()
                continue
            with self.lock:
                busy = bool(self._running)
            if busy and self._callers == 0:
                (self._nap() or self.clock.sleep)(BUSY_NAP_S)
            elif self.serves and self._callers == 0 and self.waker is not None and not self._wake.is_set():
                self.waker.sleep(IDLE_NAP_S)
            else:
                # Between transfers only services listen; `start` wakes us for anything new. A caller who waits listens
                # too, and wakes us when it goes.
                self._wake.wait(IDLE_NAP_S if self._callers == 0 else PARKED_S)
                self._wake.clear()
        if usual_s is not None:
            sys.setswitchinterval(usual_s)

    def stop(self) -> None:
        """End the thread and give up what still runs. Idempotent. MpikvError where the thread does not end."""
        self.stopped = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                raise MpikvError(
                    f"the thread that moves transfers on has not ended in {STOP_S:g} s: a call of MPI, a codec or an "
                    "optimizer does not return"
                )
        with self.lock:
            for running in (*self._running, *self._services):
                running.cancel()
            for some in (self._running, self._asked, self._woken, self._services):
                some.clear()
