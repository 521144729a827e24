"""A forked child of a rank, such as a data loader's worker, gets back the signals that a store has taken.

Python runs a handler between two steps of the interpreter. A child that is told to end while it is in C code, or just
on its way into `time.sleep`, would go on waiting, and its parent would wait for it in `join`. Without a store it would
be dead. So a child begins with the actions of before. Python forgets a signal that comes to a child earlier than that:
the forking thread holds these signals back meanwhile, and the child receives them when its actions are set.

Only actions that are not handlers of the program's own are given back at once: the program's own are called through
ours (`StopSignals`), in a child as in its parent. Children of `subprocess` have new actions anyway.
"""

from __future__ import annotations

import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None  # as signal.getsignal returns it; None: set by C


class TakesSignals(ABC):
    """An object whose methods are handlers of signals that had other actions before."""

    @abstractmethod
    def previous(self, number: int) -> Handler:
        """Return the action that signal `number` would have without this object."""


class _AtFork(threading.local):
    """The hooks that Python calls around a fork, in the thread that forks; a child has no other thread."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def before(self) -> None:
        """Hold the signals back."""
        taken = {number for number, _ in _taken()}
        self._held = taken - signal.pthread_sigmask(signal.SIG_BLOCK, taken)

    def in_parent(self) -> None:
        """Let them through."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._held)

    def in_child(self) -> None:
        """Let them through, to the actions that they had before a store took them."""
        for number, action in _taken():
            signal.signal(number, action)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._held)


def _taken() -> Iterator[tuple[int, signal.Handlers]]:
    """Return the signals that have a handler of ours in the place of a plain action, each with that action."""
    for number in signal.valid_signals():
        action = signal.getsignal(number)
        while isinstance(owner := getattr(action, "__self__", None), TakesSignals):
            action = owner.previous(number)
            if isinstance(action, signal.Handlers):
                yield number, action


def _register(hooks: _AtFork) -> None:
    os.register_at_fork(before=hooks.before, after_in_parent=hooks.in_parent, after_in_child=hooks.in_child)


_register(_AtFork())
