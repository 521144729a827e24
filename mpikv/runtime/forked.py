"""A forked child of a rank, such as a data loader's worker, gets back the signals that a store has taken.

Python runs a handler between two steps of the interpreter. A child that is told to end while it is in C code, or just
on its way into `time.sleep`, would go on waiting, and its parent would wait for it in `join`. Without a store it would
be dead. So a child begins with the actions of before. Python forgets a signal that comes to a child earlier than that:
the forking thread holds these signals back meanwhile, and the child receives them when its actions are set.

Only actions that are not handlers of the program's own are given back at once: the program's own are called through
ours (`StopSignals`), in a child as in its parent. Children of `subprocess` have new actions anyway. Signals that are to
spare what a rank has started are not given back but ignored, where they had no handler.
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
    """An object whose methods are handlers of signals that had other actions before.

    kept_off: signals that are to spare what this process starts; the main thread has blocked them.
    """

    kept_off: set[int] = set()  # noqa: RUF012 - objects that have some have a set of their own

    @abstractmethod
    def previous(self, number: int) -> Handler:
        """Return the action that signal `number` would have without this object."""


class _AtFork(threading.local):
    """The hooks that Python calls around a fork, in the thread that forks; a child has no other thread."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def before(self) -> None:
        taken: set[int] = {number for number in signal.valid_signals() for _ in takers(number)}
        self._held = taken - signal.pthread_sigmask(signal.SIG_BLOCK, taken)

    def in_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._held)

    def in_child(self) -> None:
        """Let them through, to the actions that they had before a store took them."""
        for number in signal.valid_signals():
            for taker in takers(number):
                action = taker.previous(number)
                if number in taker.kept_off:
                    self._held.add(number)  # by the parent's main thread, if not by `before`
                    action = signal.SIG_IGN if action is signal.SIG_DFL else action
                if isinstance(action, signal.Handlers):
                    signal.signal(number, action)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._held)


def takers(number: int) -> Iterator[TakesSignals]:
    """Return the objects whose handlers a signal passes through, the first one first."""
    action = signal.getsignal(number)
    while isinstance(owner := getattr(action, "__self__", None), TakesSignals):
        yield owner
        action = owner.previous(number)


_hooks = _AtFork()
os.register_at_fork(before=_hooks.before, after_in_parent=_hooks.in_parent, after_in_child=_hooks.in_child)
