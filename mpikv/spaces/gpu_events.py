"""Waiting for a GPU: a thread sleeps in the wait of an event, outside the interpreter's lock, and wakes who asked.

To ask a GPU again and again costs a call of CUDA each time, and is late by a nap; the thread costs nothing while it
sleeps. Events are waited for in the order in which somebody asked, which is that of their stream.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from mpikv.engine.operation import Waiter, Waking
from mpikv.spaces.gpu import Gpu


class EventWatcher:
    """Wakes whoever waits for events, of one stream at a time. ring: called after each, for who moves transfers."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._asked: queue.SimpleQueue[tuple[Any, Waiter] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting = self._stream = 0  # for how many events, and of which stream
        self.ring: Callable[[], None] = lambda: None

    def wake(self, event: Any, waiter: Waiter, stream: int) -> bool:
        """Promise to wake `waiter` when the event, of this stream, is done or has failed.

        False: the thread waits for another stream, which may take any time.
        """
        with self._lock:
            if self._waiting and self._stream != stream:
                return False
            self._stream = stream
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpikv-gpu", daemon=True)
                self._thread.start()
        self._asked.put((event, waiter))
        return True

    def _run(self) -> None:
        self._gpu.take()
        while (asked := self._asked.get()) is not None:
            event, waiter = asked
            with contextlib.suppress(*self._gpu.errors):  # `EventRequest.test` raises it where somebody can be told
                event.synchronize()
            with self._lock:
                self._waiting -= 1
            waiter.wake()
            self.ring()

    def close(self) -> None:
        """End the thread. Nothing is waited for any more."""
        self._asked.put(None)


class EventRequest(Waking):
    """A request that is done when an event is; None: from the start. Raises MpikvError where the GPU has failed."""

    __slots__ = ("_event", "_gpu", "_stream", "_watch")

    def __init__(self, gpu: Gpu, event: Any, stream: int, watch: EventWatcher) -> None:
        self._gpu, self._event, self._stream, self._watch = gpu, event, stream, watch

    def test(self) -> bool:
        """Whether it is done."""
        if self._event is not None:
            try:
                if not self._event.done:
                    return False
            except self._gpu.errors as error:
                raise self._gpu.failed(error, "was asked whether work is done") from error
            self._event = None
        return True

    def wakes(self, waiter: Waiter) -> bool:
        """When it is done."""
        if self._event is None:
            waiter.wake()
            return True
        return self._watch.wake(self._event, waiter, self._stream)
