"""A generator under way: the body of a collective, a server's loop or a pull, which yields what it must wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mpikv.engine.backoff import wait_until
from mpikv.engine.operation import Operation, Steps, Waiter, Waking, wakes

T = TypeVar("T")

RESUMES = 64  # of one generator in a row: a server with messages always waiting must not starve the others


class Running(Waking, Generic[T]):
    """A generator under way, moved on by its engine. It is a request with a result, and wakes those who wait for it.

    queue: where it puts itself when it is woken. asked: whether the request that it waits for wakes nobody, so that the
    engine has to resume it again and again. started: whether nobody but who tests it learns of its error, so that the
    engine keeps it for the end of the store.
    """

    def __init__(
        self, steps: Steps[T], name: str, queue: deque[Running[Any]] | None = None, *, started: bool = False
    ) -> None:
        self.name, self.queue, self.started, self.done = name, queue, started, False
        self.result: T | None = None
        self.error: BaseException | None = None
        self.raised = False  # whether `test` has raised it
        self.woken = True  # something has happened since it was last moved on
        self.asked = True
        self._steps = steps
        self._waiting_for: Operation | None = None
        self._waiters: list[Waiter] = []

    def advance(self) -> bool:
        """Resume the generator as long as the requests that it yields are done, but not for ever.

        Returns whether it moved. Raises nothing but Ctrl-C; any other exception becomes the error of this request.
        """
        moved, self.woken = False, False
        try:
            for _ in range(RESUMES):
                if self.done:
                    break
                try:
                    if self._waiting_for is not None and not self._waiting_for.test():
                        self.asked = not wakes(self._waiting_for, self)
                        break
                except Exception as error:  # noqa: BLE001 - the generator may know what to make of it
                    moved = True
                    self._waiting_for = self._steps.throw(error)
                    continue
                moved = True
                self._waiting_for = next(self._steps)
            else:
                self.asked = False
                self.wake()  # there may be more
        except StopIteration as stop:
            self._end(stop.value)
        except Exception as error:  # noqa: BLE001 - raised to whoever waits for this
            self._end(error=error)
        except BaseException as error:
            # Ctrl-C: it was meant for the caller who happens to step, not for whoever waits for this transfer.
            self._end(error=error)
            raise
        return moved

    def _end(self, result: T | None = None, error: BaseException | None = None) -> None:
        self.result, self.error, self.done = result, error, True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()

    def wake(self) -> None:
        """Put it into the queue: the request that it waits for may be done."""
        if not self.woken:
            self.woken = True
            if self.queue is not None:
                self.queue.append(self)

    def wakes(self, waiter: Waiter) -> bool:
        """Promise to wake `waiter` when the generator has ended."""
        # In this order: another thread may be about to end it.
        self._waiters.append(waiter)
        if self.done:
            waiter.wake()
        return True

    def test(self) -> bool:
        """Return whether the generator has ended. Raises the exception that ended it."""
        if self.done and self.error is not None:
            self.raised = True
            raise self.error
        return self.done

    def fail(self, error: BaseException) -> None:
        """End it with an error, which is raised to whoever waits for it. The caller holds the engine's lock."""
        if not self.done:
            self._steps.close()
            self._end(error=error)
            self.wake()  # so that the engine forgets it

    def cancel(self) -> None:
        """End it without a result: the generator's `finally` blocks run, and nothing moves any more."""
        if not self.done:
            self._steps.close()
            self._end()
            self.wake()


class Ended(Waking):
    """A request that is done when something under way has ended, well or not: it raises nothing."""

    def __init__(self, running: Running[Any]) -> None:
        self._running = running

    def test(self) -> bool:
        return self._running.done

    def wakes(self, waiter: Waiter) -> bool:
        return self._running.wakes(waiter)


def run(steps: Steps[T], timeout_s: float, on_timeout: Callable[[], BaseException]) -> T:
    """Run one generator to its end without an engine, in a rank that has nothing else to do. Blocks."""
    running = Running(steps, "")
    wait_until(running.test, running.advance, timeout_s, on_timeout)
    return running.result  # type: ignore[return-value]
