"""`Prefetch`: an iterator whose values a thread makes ahead, a fixed number of them.

The thread makes the next value as long as fewer than `ahead` wait, so at most `ahead` + 1 values exist that nobody has
taken. What it raises is raised to the caller, in its place in the order and with its traceback. The thread ends with
the last value, with an error, with `close`, when the iterator is let go of (a loop that is left), and when the program
ends; it never outlives these by more than the value it is making, and whoever ends it waits for that, at most `END_S`.
"""

from __future__ import annotations

import collections
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

END_S = 60.0  # a value that takes longer hangs, on a disk that is gone, say, and the program is to end all the same
_LOOK_AGAIN_S = 1.0  # a wait looks after the thread so often: it might have been killed with the process's fork


class _Queue(Generic[T]):
    """What the thread and the iterator both hold.

    The thread does not hold the iterator itself: when the caller lets that go it is collected, which ends the thread.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: collections.deque[T] = collections.deque()
        self.error: BaseException | None = None
        self.ended = False  # no more values come
        self.stopped = False  # nobody takes any more


class Prefetch(Iterator[T]):
    """Iterates over the values of `make()`, which a thread calls. ahead >= 1. Only one thread may take values."""

    def __init__(self, make: Callable[[], Iterator[T]], ahead: int) -> None:
        self._shared: _Queue[T] = _Queue()
        self._pid = os.getpid()
        # A daemon, as the interpreter would wait for any other before it lets anybody end it; `finalize` does, at exit
        # too.
        self._thread = threading.Thread(
            target=_run, args=(self._shared, make, ahead), name="mpikv-prefetch", daemon=True
        )
        self._thread.start()
        self._close = weakref.finalize(self, _end, self._shared, self._thread, self._pid)

    def __next__(self) -> T:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "batches are loaded by a thread of the process that was forked; iterate anew in this one"
            )
        shared = self._shared
        with shared.changed:
            while not shared.values and not shared.ended:
                if not shared.changed.wait(_LOOK_AGAIN_S) and not self._thread.is_alive() and not shared.ended:
                    raise RuntimeError("the thread that loads batches is gone")
            if shared.values:
                value = shared.values.popleft()
                shared.changed.notify_all()
                return value
            error, shared.error = shared.error, None
        self.close()
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread and let go of what it made. `next` raises StopIteration afterwards."""
        self._close()


def _run(shared: _Queue[T], make: Callable[[], Iterator[T]], ahead: int) -> None:
    error: BaseException | None = None
    try:
        for value in make():
            with shared.changed:
                while len(shared.values) >= ahead and not shared.stopped:
                    shared.changed.wait()
                if shared.stopped:
                    return
                shared.values.append(value)
                shared.changed.notify_all()
            del value  # not to be held while the next one is made
    except BaseException as caught:  # noqa: BLE001 - it is raised where the values are taken
        error = caught
    finally:
        with shared.changed:
            shared.error, shared.ended = error, True
            shared.changed.notify_all()


def _end(shared: _Queue[T], thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked process has no such thread, and the lock may be held for ever
    with shared.changed:
        shared.stopped = True
        shared.values.clear()
        shared.changed.notify_all()
    if threading.current_thread() is not thread:  # the collector of garbage runs in any thread
        thread.join(END_S)
