"""Waiting for a GPU: a thread sleeps until a CUDA event is done, then wakes those who wait for it.

To poll a GPU costs a call of CUDA each time, and notices the end late; a thread that sleeps in CUDA costs nothing, and
does not hold the interpreter's lock. It waits for events in the order of the requests, which is that of their stream.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from mpikv.engine.operation import Waiter, Waking
from mpikv.observe.recorder import Part
from mpikv.spaces.gpu import Gpu


class EventWatcher:
    """Wakes those who wait for events, of one stream at a time. callback: called after each event, for the engine."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._asked: queue.SimpleQueue[tuple[Any, Waiter] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting = self._stream = 0  # number of events that are waited for, and their stream
        self.callback: Callable[[], None] = lambda: None

    def wake(self, event: Any, waiter: Waiter, stream: int) -> bool:
        """Wake `waiter` when the event is done or has failed. False: the thread waits for another stream."""
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
            with contextlib.suppress(*self._gpu.errors):  # `EventRequest.test` raises it in a thread that can report it
                event.synchronize()
            with self._lock:
                self._waiting -= 1
            waiter.wake()
            self.callback()

    def close(self) -> None:
        self._asked.put(None)


class EventRequest(Waking):
    """A request for an event; None: it is done from the start. part: is recorded when it is found done."""

    __slots__ = ("_event", "_gpu", "_part", "_stream", "_watcher")

    def __init__(self, gpu: Gpu, event: Any, stream: int, watcher: EventWatcher, part: Part | None = None) -> None:
        self._gpu, self._event, self._stream, self._watcher, self._part = gpu, event, stream, watcher, part

    def test(self) -> bool:
        if self._event is not None:
            try:
                if not self._event.done:
                    return False
            except self._gpu.errors as error:
                raise self._gpu.failed(error, "failed while its work was waited for") from error
            self._event = None
            if self._part is not None:
                self._part.done("GPU")
        return True

    def wakes(self, waiter: Waiter) -> bool:
        """Arrange that `waiter` is woken when it is done; see `Waking`."""
        if self._event is None:
            waiter.wake()
            return True
        return self._watcher.wake(self._event, waiter, self._stream)
