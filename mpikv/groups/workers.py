"""The workers of a store as a group: collective calls without keys, one after another, each of which blocks.

What the workers bring is compared first, by a digest of the call's text: through memory with the call's first chunk
(shared.py), by messages in an allreduce of 16 bytes. Where it differs every worker raises MismatchError, nothing has
been done, and the next call is made as if this one had never been.

Waits are those of the store, with its limits and its reports: a call counts as a push of a key, `CALLS_ID`.

Cost: that of the call, and by messages that of the small allreduce.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from mpikv.common.digests import MASK, digest
from mpikv.engine.operation import Steps
from mpikv.engine.running import Running
from mpikv.errors import MpikvError
from mpikv.groups.call import spin
from mpikv.groups.collective import Collective
from mpikv.groups.messages import MessageCalls
from mpikv.groups.operators import OPERATORS
from mpikv.groups.shared import MismatchError, SharedCalls, region_bytes
from mpikv.hostmemory.segment import HostMemory
from mpikv.observe.stall import Waiting
from mpikv.session.base import Pending
from mpikv.session.workers import CALLS_ID, CALLS_NAME, Workers
from mpikv.transports import wire
from mpikv.transports.base import Group

Reserve = Callable[[str, int], "tuple[HostMemory, int] | None"]


class WorkersGroup:
    """One worker's side. reserve: see `Strategy.reserve`."""

    def __init__(self, session: Workers, reserve: Reserve) -> None:
        self._session, self._reserve = session, reserve
        self._lock = threading.Lock()
        self._group: Group | None = None  # of whom the other two are; workers may go on without others
        self._messages: MessageCalls
        self._shared: SharedCalls | None = None
        self._failure: BaseException | None = None

    def run(self, made: Collective, call: str) -> None:
        """Make a call of all workers of an open store. Collective, blocks.

        call: its name in errors. Raises MismatchError on every worker where their texts differ; StallError, PeerError.
        """
        session = self._session
        with self._lock:
            if self._failure is not None:
                raise MpikvError(
                    f"{call}: an earlier collective call of this store has failed, and its workers are not in step any "
                    f"more ({type(self._failure).__name__}: {self._failure})"
                ) from self._failure
            if self._group is not session.group:
                self._open(session.group, call)
            engine, shared = session.engine, self._shared
            if engine.failure is not None:
                raise engine.failure
            session.calls_made += 1
            waiting = Waiting(call, CALLS_NAME, CALLS_ID, session.calls_made)
            try:
                if shared is None or made.in_memory is None:
                    running = Running(self._by_messages(made), call)
                else:
                    running = Running(shared.run(digest(made.text), partial(made.in_memory, shared)), call)
                    spin(running, engine.clock)
                if not running.done:
                    engine.take(running)
                session.wait(Pending(running, waiting))
            except MismatchError:
                raise
            except BaseException as error:
                self._failure = error
                if not isinstance(error, Exception):  # Ctrl-C
                    engine.interrupted(call, error)
                raise

    def _open(self, group: Group, call: str) -> None:
        """Find out how these workers reach each other. Collective."""
        members = self._session.members
        found = None
        if members.path == "direct":
            found = self._reserve(call, -(-region_bytes(group.size) // group.size))
        self._shared = None if found is None else SharedCalls(*found, group.rank, group.size)
        self._messages = MessageCalls(group, members.config.host_algorithm)
        self._group = group

    def _by_messages(self, made: Collective) -> Steps[None]:
        code = digest(made.text)
        # The largest digest, and what the smallest one lacks to 64 ones: every worker sees whether they are the same.
        seen = np.array([code, code ^ MASK], np.uint64)
        yield from self._messages.allreduce([seen], OPERATORS["max"], wire.TAG_CALLS)
        if int(seen[0]) ^ MASK != int(seen[1]):
            raise MismatchError("workers of a store made different calls: every one makes the same, in the same order")
        # No worker sends under this tag for its next call before all have ended this one, and so take its messages.
        yield from made.by_messages(self._messages, wire.TAG_CALLS + 1)
