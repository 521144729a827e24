"""What is under way, as those see it who wait for it: a request, and generators that yield requests."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Request(Protocol):
    """Something under way. `test` never waits, and goes on saying True once it did."""

    def test(self) -> bool:
        """Whether it is done. Raises what went wrong with it."""
        ...


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
