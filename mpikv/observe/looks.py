"""Looks at what other threads and ranks do, none of which may ever end a job: the error of a look is counted.

Whoever looks reads what another thread changes meanwhile, and mostly in a progress engine, whose errors end the job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Otherwise = TypeVar("Otherwise")


class Looks:
    """The looks of one rank. failed: how many have ended by an error."""

    def __init__(self) -> None:
        self.failed = 0


def look(otherwise: Otherwise) -> Callable[[Callable[P, T]], Callable[P, T | Otherwise]]:
    """Decorate a method: an exception that it raises is counted in its object's `looks`, and it returns `otherwise`."""

    def decorate(method: Callable[P, T]) -> Callable[P, T | Otherwise]:
        @functools.wraps(method)
        def looking(*args: P.args, **kwargs: P.kwargs) -> T | Otherwise:
            try:
                return method(*args, **kwargs)
            except Exception:  # noqa: BLE001 - whatever it is, those that are looked at have done nothing wrong
                args[0].looks.failed += 1  # type: ignore[attr-defined]
                return otherwise

        return looking

    return decorate
