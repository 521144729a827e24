"""The progress engine: moves every transfer of one store on, and waits without spinning.

Collectives, server loops and pulls are generators that yield each request they must wait for. `Engine.start` makes a
`Running` of one, itself a request; `Engine.step` resumes those whose request is done. Neither Open MPI nor MPICH moves
a message on by itself while Python computes, so a thread of the engine steps whenever no caller does. Whoever steps
holds one lock, so all MPI calls of a store come from one thread at a time.

Waiting polls a little, then yields the processor, then sleeps in growing steps: there are often more ranks than cores.

Cost: a step is one `test` for each running generator. An idle engine wakes `1 / IDLE_NAP_S` times a second.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mpikv.errors import MpikvError
from mpikv.transports.base import Request, Steps, Transport

T = TypeVar("T")

POLLS = 20  # an 8-byte message between two idle ranks is there within about ten polls
YIELDS = 40  # with more ranks than cores the peer needs our core: hand it over before sleeping
FIRST_NAP_S = 20e-6
NAP_GROWTH = 1.3  # a nap is then about a quarter of the time waited so far: what comes meanwhile is seen so much later
SHORT_NAPS = 2  # after more of them, 200 us, a message was not about to come: it has crossed a link, or a rank is late
LAST_NAP_S = 500e-6  # the price of a long wait is at most this much more
RESUMES = 64  # of one generator in a row: a server with messages always waiting must not starve the others
LONG_WAIT = 1200  # naps, less than a second, after which they are four times as long: 4 % of a core for a waiting rank
# Beside Python code that computes, the engine waits so long for the interpreter's lock each time: after a nap and after
# each call of MPI and each addition, which give it up. With Python's own 5 ms most of a link stays idle.
BUSY_SWITCH_S = 0.5e-3
BUSY_NAP_S = 2e-3  # beside a program that computes: a link has much longer to do, and each wake-up takes 30 us from it
PARKED_S = 50e-3  # while a caller does the work
LONGEST_TURN = 0.05
IDLE_NAP_S = 2e-3  # 500 wake-ups of about 10 us each: half a percent of a core


class Backoff:
    """Poll, then yield, then sleep in steps that grow up to `last_nap_s`."""

    def __init__(self, last_nap_s: float = LAST_NAP_S, sleep: Callable[[float], None] | None = None) -> None:
        self._last_nap_s = last_nap_s
        self._sleep = sleep  # ends sooner when something comes
        self._turn = 0

    def reset(self) -> None:
        """Something moved: poll again, but nap at once where it took several naps to come, as the next one will.

        Not where a nap ends by itself: what comes through memory comes in a row.
        """
        short = self._turn <= POLLS + YIELDS + SHORT_NAPS or self._sleep is not None
        self._turn = 0 if short else POLLS + YIELDS

    def pause(self) -> None:
        """Let some time pass, more at each call in a row."""
        self._turn += 1
        if self._turn <= POLLS:
            return
        if self._turn <= POLLS + YIELDS:
            os.sched_yield()
            return
        longest_s = self._last_nap_s if self._turn < LONG_WAIT else 4 * self._last_nap_s
        if self._sleep is not None:
            longest_s *= 2  # only what rings no bell comes so late
        (self._sleep or time.sleep)(min(FIRST_NAP_S * NAP_GROWTH ** min(self._turn - POLLS - YIELDS, 60), longest_s))


class Running(Generic[T]):
    """A generator under way, moved on by its engine; a request with a result."""

    def __init__(self, steps: Steps[T], name: str) -> None:
        self.name = name
        self.done = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self.woken = True  # something has happened since it was last moved on
        self._steps = steps
        self._waiting_for: Request | None = None

    def advance(self) -> bool:
        """Resume while the yielded requests are done, but not for ever. Raises nothing but Ctrl-C.

        Returns whether anything moved.
        """
        moved, self.woken = False, False
        for _ in range(RESUMES):
            if self.done:
                break
            try:
                try:
                    if self._waiting_for is not None and not self._waiting_for.test():
                        break
                except Exception as error:  # noqa: BLE001 - the generator may know what to make of it
                    moved, self._waiting_for = True, self._steps.throw(error)
                    continue
                moved = True
                self._waiting_for = next(self._steps)
            except StopIteration as stop:
                self.result, self.done = stop.value, True
            except Exception as error:  # noqa: BLE001 - handed to whoever waits for this
                self.error, self.done = error, True
            except BaseException as error:
                # Ctrl-C: it was meant for the caller who happens to step, not for whoever waits for this transfer.
                self.error, self.done = error, True
                raise
        else:
            self.woken = True  # there may be more
        return moved

    def may_move(self) -> bool:
        """Whether moving it on is worth while: not if it waits for messages of its own, and none has come or gone."""
        waiting_for = self._waiting_for
        return self.woken or not (getattr(waiting_for, "wakes", False) or getattr(waiting_for, "owner", None) is self)

    def test(self) -> bool:
        """Whether it has ended. Raises the exception that ended it."""
        if self.done and self.error is not None:
            raise self.error
        return self.done

    def fail(self, error: BaseException) -> None:
        """Give up with an error: whoever waits for this raises it. Under the engine's lock."""
        if not self.done:
            self._steps.close()
            self.error, self.done = error, True

    def cancel(self) -> None:
        """Give up: the generator's `finally` blocks run, nothing moves any more."""
        if not self.done:
            self._steps.close()
            self.done = True


def run(steps: Steps[T], timeout_s: float, on_timeout: Callable[[], BaseException]) -> T:
    """Run one generator to its end without an engine, for a rank that has nothing else to do."""
    running = Running(steps, "")
    wait_until(running.test, running.advance, timeout_s, on_timeout)
    return running.result  # type: ignore[return-value]


def wait_until(
    test: Callable[[], bool],
    step: Callable[[], bool],
    timeout_s: float,
    on_timeout: Callable[[], BaseException],
    sleep: Callable[[float], None] | None = None,
) -> None:
    """Call `step` until `test` says True; after `timeout_s` seconds raise what `on_timeout` returns.

    One turn counts for LONGEST_TURN of the limit at most: who was stopped, alone or with the machine, has not waited.
    """
    backoff = Backoff(sleep=sleep)
    waited_s, before_s = 0.0, time.monotonic()
    while not test():
        moved = step()
        now_s = time.monotonic()
        waited_s += min(now_s - before_s, LONGEST_TURN * timeout_s)
        before_s = now_s
        if waited_s >= timeout_s and not test():
            raise on_timeout()
        if moved:
            backoff.reset()
        else:
            backoff.pause()


class Engine:
    """Moves the transfers of one store on.

    threaded: whether a thread steps while no caller does; needs an MPI library with THREAD_MULTIPLE.
    on_fatal: called with the exception that ended a service (a generator that must never end by one). transport: one
    that can `poll`, and then wakes the `owner` of what is done.
    """

    def __init__(
        self, *, threaded: bool, on_fatal: Callable[[BaseException], None], transport: Transport | None = None
    ) -> None:
        self._transport: Any = transport if hasattr(transport, "poll") else None
        self._lock = threading.RLock()
        self._running: list[Running[Any]] = []
        self._services: list[Running[Any]] = []
        self._on_fatal = on_fatal
        self._callers = 0  # threads inside `wait`, which step by themselves
        self._wake = threading.Event()
        self._stopped = False
        self.bell: Any = None  # where others of this host can wake this rank (waker.py)
        self.serves = False  # they expect answers while no caller waits
        self.failure: BaseException | None = None  # what ended a service, or was interrupted; later waits raise it
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._loop, name="mpikv-progress", daemon=True)
            self._thread.start()

    @property
    def lock(self) -> threading.RLock:
        """Held by whoever steps; take it to read or change what generators read or change."""
        return self._lock

    def start(self, steps: Steps[T], name: str) -> Running[T]:
        """Start a generator and run it as far as it goes at once."""
        running = Running(steps, name)
        self.take(running)
        return running

    def take(self, running: Running[Any]) -> None:
        """Move on what was under way without an engine, as `start` does."""
        with self._lock:
            self._advance(running)
            if not running.done:
                self._running.append(running)
                self._wake.set()
                if self.serves and self.bell is not None:
                    self.bell.wake_self()

    def serve(self, steps: Steps[Any], name: str) -> Running[Any]:
        """Start a generator that runs beside the others until it ends or the engine stops."""
        running = Running(steps, name)
        with self._lock:
            self._services.append(running)
            self._wake.set()
        return running

    def step(self) -> bool:
        """Move everything on that can move; whether anything did."""
        with self._lock:
            moved = False
            if self._transport is not None:
                self._transport.poll()
            for running in self._services:
                moved |= self._advance(running)
                if running.error is not None:
                    self._services.remove(running)
                    self.failure = self.failure or running.error
                    self._on_fatal(running.error)
                    break  # the others are moved on by the next step
            ended = False
            for running in tuple(self._running):
                if self._transport is None or running.may_move():
                    moved |= self._advance(running)
                    ended |= running.done
            if ended:
                self._running = [running for running in self._running if not running.done]
            return moved

    def _advance(self, running: Running[Any]) -> bool:
        try:
            if self._transport is None:
                return running.advance()
            before, self._transport.owner = self._transport.owner, running
            try:
                return running.advance()
            finally:
                self._transport.owner = before
        except BaseException as error:  # Ctrl-C: `advance` raises nothing else
            self.interrupted(running.name, error)
            raise

    def interrupted(self, name: str, error: BaseException) -> None:
        """A transfer was hit and is lost, and other ranks count on it: let every later wait say so."""
        self.failure = self.failure or MpikvError(
            f"{type(error).__name__} has interrupted a transfer half-way ({name}), and the other workers count on this "
            "worker's part of it: this store can be used no more"
        )

    def wait(
        self,
        request: Request,
        timeout_s: float,
        on_timeout: Callable[[], BaseException],
        check: Callable[[], None] | None = None,
    ) -> None:
        """Block until `request` is done. Raises its error, what `check` raises, or `on_timeout()` when time is up."""

        def test() -> bool:
            with self._lock:
                if self.failure is not None:
                    raise self.failure
                if request.test():
                    return True
                if check is not None:
                    check()
                return False

        with self._lock:
            self._callers += 1
        try:
            sleep = None if self.bell is None else self.bell.sleep
            wait_until(test, self.step, timeout_s, on_timeout, sleep)
        finally:
            with self._lock:
                self._callers -= 1
                if self._running:
                    self._wake.set()

    def _loop(self) -> None:
        backoff = Backoff(IDLE_NAP_S)
        usual_s = None  # the user's switch interval, while ours is in force
        while not self._stopped:
            with self._lock:
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
            with self._lock:
                busy = bool(self._running)
            if busy and self._callers == 0:
                (time.sleep if self.bell is None else self.bell.sleep)(BUSY_NAP_S)
            elif self.serves and self._callers == 0 and self.bell is not None and not self._wake.is_set():
                self.bell.sleep(IDLE_NAP_S)
            else:
                # Between transfers only services listen; `start` wakes us for anything new. A caller who waits listens
                # too, and wakes us when it goes.
                self._wake.wait(IDLE_NAP_S if self._callers == 0 else PARKED_S)
                self._wake.clear()
        if usual_s is not None:
            sys.setswitchinterval(usual_s)

    def stop(self) -> None:
        """End the thread and give up what still runs. Idempotent."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            for running in (*self._running, *self._services):
                running.cancel()
            self._running, self._services = [], []
