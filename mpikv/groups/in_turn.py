"""Calls that are made one after another in a thread of their own, so that whoever begins one does not wait for it.

The thread lives while there are calls, and is a daemon: it must not keep a program that has failed from ending.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


class CallsInTurn:
    """Of one group. threaded: whether calls may be made by another thread; else `begin` makes them itself."""

    def __init__(self, *, threaded: bool) -> None:
        self._threaded = threaded
        self._lock = threading.Lock()
        self._calls: deque[tuple[Future[Any], Callable[[], Any], str | None]] = deque()  # the first one is under way
        self._thread: threading.Thread | None = None

    def begin(self, call: Callable[[], T], name: str | None = None) -> Future[T]:
        """Make a call after those that were begun before. Local. Raises ValueError where one of them has this name."""
        future: Future[T] = Future()
        if not self._threaded:
            self._make(future, call)
            return future
        with self._lock:
            if name is not None and any(name == earlier for _, _, earlier in self._calls):
                raise ValueError(f"a call named {name!r} is under way: synchronize it first, or give another name")
            self._calls.append((future, call, name))
            if self._thread is None:
                self._thread = threading.Thread(target=self._make_all, name="mpikv-calls", daemon=True)
                self._thread.start()
        return future

    def wait(self) -> None:
        """Block until the calls begun so far have ended, each of which has a limit. Does nothing within one of them."""
        with self._lock:
            if not self._calls or threading.current_thread() is self._thread:
                return
            last, _, _ = self._calls[-1]
        wait([last])

    def _make_all(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._thread = None
                    return
                future, call, _ = self._calls[0]
            self._make(future, call)
            del future, call  # they keep tensors alive

    def _make(self, future: Future[Any], call: Callable[[], Any]) -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001 - for whoever asks for the result
            error = raised
        with self._lock:
            if self._calls:
                self._calls.popleft()  # before anybody can know that it has ended, and use its name again
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
