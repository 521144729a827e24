"""What is under way, as it looks to those who wait for it: operations, and generators that yield them.

Whoever waits for an operation asks it again and again. An operation whose type is `Waking` makes that unnecessary: it
promises to wake the one who waits when there is a reason to ask again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Operation(Protocol):
    """Something under way. `test` never waits, and once it has returned True it goes on returning it."""

    def test(self) -> bool:
        """Return whether it is done. Raises the error if it has failed."""
        ...


class Waiter(Protocol):
    """Somebody who waits for an operation, and does nothing else until the operation wakes it."""

    def wake(self) -> None:
        """Ask the operation again: it may be done. May be called more than once, and by any thread."""
        ...


class Waking:
    """Base of operations that wake whoever waits for them. One generator at a time waits for such an operation."""

    __slots__ = ()

    def test(self) -> bool:
        raise NotImplementedError

    def wakes(self, waiter: Waiter) -> bool:
        """Promise to wake `waiter` when there is a reason to ask again, which may be at once.

        Returns False where the request cannot promise that now, because something that it consists of cannot; the
        waiter then has to ask.
        """
        raise NotImplementedError


def wakes(request: Operation | None, waiter: Waiter) -> bool:
    """Return whether `request` has promised to wake `waiter`."""
    return isinstance(request, Waking) and request.wakes(waiter)


class Completion(Waking):
    """A request that is done when somebody calls `finish`."""

    __slots__ = ("_waiter", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None
        self._waiter: Waiter | None = None

    def test(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    def finish(self, error: Exception | None = None) -> None:
        """Say that it is done, or has failed with `error`, and wake whoever waits for it."""
        self.error, self.done = error, True
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.wake()

    def wakes(self, waiter: Waiter) -> bool:
        """Promise it: this request always can."""
        # In this order: a thread of another rank may call `finish` in between.
        self._waiter = waiter
        if self.done:
            waiter.wake()
        return True


class Turns:
    """Lets what takes a turn go on in the order in which the turns were taken."""

    def __init__(self) -> None:
        self._queue: deque[Completion] = deque()

    @property
    def taken(self) -> bool:
        """Whether somebody has a turn, or waits for it."""
        return bool(self._queue)

    @contextmanager
    def take(self) -> Iterator[Completion]:
        """Take a turn, until the end of the block. Gives a request that is done when it has come."""
        turn = Completion()
        self._queue.append(turn)
        try:
            self._queue[0].finish()
            yield turn
        finally:
            self._queue.remove(turn)
            if self._queue:
                self._queue[0].finish()


# The body of a collective or of a server's loop: it yields each request that it must wait for, and returns its result.
Steps = Generator[Operation, None, T]


class Done:
    """A request that is done from the start."""

    def test(self) -> bool:
        return True


class Predicate:
    """A request that is done when a function returns True."""

    def __init__(self, predicate: Callable[[], bool]) -> None:
        self._predicate = predicate

    def test(self) -> bool:
        return self._predicate()
