"""The workers of a store as a group: collective calls without keys, one after another, each of which blocks.

`in_turn` makes calls in a thread, in the order in which they were begun; a call that blocks comes after them. Calls are
compared first, by a digest of the call's text: through memory with the call's first chunk (shared.py), by messages in
an allreduce of 16 bytes. Where digests differ, every worker raises MismatchError, and no array is changed.

Waits have the store's limits and reports: a call counts as a push of a key, `CALLS_ID`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mpikv.arrays.reductions import OF_GROUPS
from mpikv.common.digests import MASK, digest
from mpikv.engine.operation import Steps
from mpikv.engine.running import Running
from mpikv.errors import MpikvError
from mpikv.groups.call import spin
from mpikv.groups.collective import Collective
from mpikv.groups.messages import MessageCalls
from mpikv.groups.shared import MismatchError, SharedCalls, region_bytes
from mpikv.hostmemory.segment import HostMemory
from mpikv.observe.stall import Waiting
from mpikv.session.base import Pending
from mpikv.session.continued import ContinuedSession
from mpikv.session.workers import CALLS_ID, CALLS_NAME, Workers
from mpikv.transports import wire
from mpikv.transports.base import Group

T = TypeVar("T")
Reserve = Callable[[int], "tuple[HostMemory, int | None] | None"]


class CallsInTurn:
    """Calls that a thread makes one after another, so that whoever begins one does not wait for it.

    The thread lives while there are calls, and is a daemon: it must not keep a program that has failed from ending.
    threaded: whether calls may be made by another thread; else `begin` makes them itself.
    """

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


class WorkersGroup:
    """One worker's side. reserve: see `Strategy.reserve`."""

    def __init__(self, session: Workers, reserve: Reserve) -> None:
        self._session, self._reserve = session, reserve
        self._lock = threading.Lock()
        self.in_turn = CallsInTurn(threaded=session.threaded)
        session.before_close.append(self.in_turn.wait)
        self._group: Group | None = None  # that the next two are made for; it changes when workers go on without others
        self._messages: MessageCalls
        self._shared: SharedCalls | None = None
        self._failure: BaseException | None = None

    def run(self, described: Collective, call: str, *, patient: bool = False) -> None:
        """Make a call that all workers of an open store make. Collective, blocks.

        call: its name in errors. patient: whether something else than the store's limit ends it. Raises MismatchError
        on every worker where their texts differ; StallError, PeerError.
        """
        session = self._session
        self.in_turn.wait()
        with self._lock:
            if self._failure is not None:
                raise MpikvError(
                    f"{call}: an earlier collective call of this store has failed, and its workers are not in step any "
                    f"more ({type(self._failure).__name__}: {self._failure})"
                ) from self._failure
            engine = session.engine
            if engine.failure is not None:
                raise engine.failure
            session.calls_made += 1
            waiting = Waiting(call, CALLS_NAME, CALLS_ID, session.calls_made)
            part = session.recorder.begin(call, session.calls_made) if session.recorder.on else None
            try:
                if self._group is not session.group:
                    self._open(session.group, waiting)
                shared = self._shared
                if shared is None or described.in_memory is None:
                    running = Running(self._by_messages(described), call)
                else:
                    running = Running(shared.run(digest(described.text), partial(described.in_memory, shared)), call)
                    spin(running, engine.clock)
                if not running.done:
                    engine.take(running)
                session.wait(Pending(running, waiting), math.inf if patient else None)
            except MismatchError:
                raise
            except BaseException as error:
                self._failure = error
                if not isinstance(error, Exception):  # Ctrl-C
                    engine.interrupted(call, error)
                raise
            if part is not None:
                part.done("collective")

    def _open(self, group: Group, waiting: Waiting) -> None:
        """Set up calls of these workers: through memory that worker 0 reserves where they share one, else by messages.

        No agreement of the workers, since another thread of this one may take part in one meanwhile.
        """
        session, found = self._session, None
        self._messages, self._shared = MessageCalls(group), None
        if session.members.path == "direct":
            found = self._reserve(-(-region_bytes(group.size) // group.size))
        if found is not None:
            memory, begin = found
            told = np.array([-1 if begin is None else begin], np.int64)
            running = Running(self._messages.broadcast([told], 0, wire.TAG_CALLS), waiting.call)
            session.wait(Pending(session.engine.take(running), waiting))
            if told[0] >= 0:
                self._shared = SharedCalls(memory, int(told[0]), group.rank, group.size)
        self._group = group

    def _by_messages(self, described: Collective) -> Steps[None]:
        code = digest(described.text)
        # The largest digest and the largest complement, which is that of the smallest digest: where the one is not the
        # complement of the other, digests differ.
        largest = np.array([code, code ^ MASK], np.uint64)
        yield from self._messages.allreduce([largest], OF_GROUPS["max"], wire.TAG_CALLS)
        if int(largest[0]) ^ MASK != int(largest[1]):
            raise MismatchError("workers of a store made different calls: every one makes the same, in the same order")
        # All calls can use this one tag: the next call begins with the allreduce above, which ends on no worker before
        # all workers have ended this call.
        yield from described.by_messages(self._messages, wire.TAG_CALLS + 1)


class ContinuedGroup:
    """The calls of workers that go on without those that die: those of the present generation, in one order."""

    def __init__(self, session: ContinuedSession) -> None:
        self._session = session
        self.in_turn = CallsInTurn(threaded=session.threaded)
        session.before_close.append(self.in_turn.wait)

    def run(self, described: Collective, call: str, *, patient: bool = False) -> None:
        """See `WorkersGroup`. A death ends it by an error, which `ContinuedSession.whole` knows."""
        self.in_turn.wait()
        self._session.now.calls.run(described, call, patient=patient)
