"""A generator under way: the body of a collective, a server's loop or a pull, which yields what it must wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from mpikv.engine.backoff import wait_until
from mpikv.engine.request import Request, Steps

T = TypeVar("T")

RESUMES = 64  # of one generator in a row: a server with messages always waiting must not starve the others


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
