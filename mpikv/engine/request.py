"""What is under way, as those see it who wait for it: a request, and generators that yield requests.

Who waits for a request asks it again and again. A request of a type that is `Waking` spares it that: it promises to
wake the one who waits when there is a reason to ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Request(Protocol):
    """Something under way. `test` never waits, and goes on saying True once it did."""

    def test(self) -> bool:
        """Whether it is done. Raises what went wrong with it."""
        ...


class Waiter(Protocol):
    """Who waits for a request and does nothing else until it is woken."""

    def wake(self) -> None:
        """There is a reason to ask the request again. May be called more than once, and by any thread."""
        ...


class Waking:
    """Base of the requests that wake who waits for them. One generator at a time waits for such a request."""

    __slots__ = ()

    def test(self) -> bool:
        """As `Request.test`."""
        raise NotImplementedError

    def wakes(self, waiter: Waiter) -> bool:
        """Promise to wake `waiter` once there is a reason to ask again; at once where there is one already.

        False: this request cannot promise it now, because what it is made of cannot; then `waiter` has to ask.
        """
        raise NotImplementedError


def wakes(request: Request | None, waiter: Waiter) -> bool:
    """Whether `request` has promised to wake `waiter`."""
    return isinstance(request, Waking) and request.wakes(waiter)


class Completion(Waking):
    """A request that is done when somebody calls `finish`."""

    __slots__ = ("_waiter", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None
        self._waiter: Waiter | None = None

    def test(self) -> bool:
        """Whether it is done. Raises the error that it was finished with."""
        if self.error is not None:
            raise self.error
        return self.done

    def finish(self, error: Exception | None = None) -> None:
        """It is done, or has failed: wake who waits."""
        self.error, self.done = error, True
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.wake()

    def wakes(self, waiter: Waiter) -> bool:
        """It always does."""
        # In this order: a thread of another rank may call `finish` in between.
        self._waiter = waiter
        if self.done:
            waiter.wake()
        return True


# The body of a collective or of a server's loop: it yields each request that it must wait for, and returns its result.
Steps = Generator[Request, None, T]


class Done:
    """A request that is done from the start."""

    def test(self) -> bool:
        """True."""
        return True


class Predicate:
    """A request that is done when a function says so."""

    def __init__(self, predicate: Callable[[], bool]) -> None:
        self._predicate = predicate

    def test(self) -> bool:
        """What the function says."""
        return self._predicate()
