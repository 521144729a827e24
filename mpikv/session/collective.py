"""Calls that all workers of a store make, and that are about no key: agreements, a barrier, and bytes for all.

An agreement has a topic, and no name but its count: the third `barrier` of each worker is one. What worker 0 alone can
do (`decide`) it does, and everybody gets its result or its error. Bytes that are too long for control messages go by
a tree of separate ones (collectives/blobs.py).

Cost: two control messages per worker and agreement.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

from mpikv.collectives import blobs
from mpikv.engine.engine import Engine
from mpikv.engine.operation import Operation
from mpikv.errors import MpikvError, PeerError, StallError
from mpikv.observe.activity import Activity
from mpikv.observe.stall import Waiting
from mpikv.session.agreeing import Agreeing
from mpikv.session.base import Session
from mpikv.session.messages import ControlMessages
from mpikv.session.waits import Waits
from mpikv.spaces.named import Spaces
from mpikv.transports import wire
from mpikv.transports.base import Group


class CollectiveSession(Session):
    """A session of several workers; `Workers`, which sets these, is all of it."""

    group: Group
    engine: Engine
    messages: ControlMessages
    waits: Waits
    agreeing: Agreeing
    activity: Activity

    def __init__(self, name: str, stop_file: str, spaces: Spaces | None) -> None:
        super().__init__(name, stop_file, spaces)
        self._counts: dict[str, int] = {}

    def wait_for(self, request: Operation, call: str, owners: tuple[str, ...] = ()) -> None:
        self.waits.wait(request, Waiting(call, owners=owners))

    def _count(self, topic: str) -> int:
        self._counts[topic] = self._counts.get(topic, 0) + 1
        return self._counts[topic]

    def agree(self, topic: str, payload: Any, call: str, *, patient: bool = False) -> Any:
        """One agreement of all workers under a topic that has no name but its count. Collective, blocks."""
        count = self._count(topic)
        waiting = Waiting(call, agreed=(topic, count))
        try:
            return self.agreeing.agree(topic, count, payload, waiting, patient=patient)
        except MpikvError as error:
            if not isinstance(error, (StallError, PeerError)):
                # Refused on every worker that made this call, and others were never in it: the count stays in step.
                self._counts[topic] -= 1
            raise

    def decide(self, call: str, attempt: Callable[[], Any] | None) -> Any:
        """Worker 0 tries something that may fail; every worker gets its result or raises its error. Collective.

        call: the topic. attempt: at worker 0, returns JSON. Its error is raised there; on the others it is the same for
        MpikvError and OSError, and an MpikvError that names it for others.
        """
        self.check_open(call)
        payload: Any = None
        failure: Exception | None = None
        if self.group.rank == 0 and attempt is not None:
            try:
                payload = ["ok", attempt()]
            except Exception as error:  # noqa: BLE001 - raised below; the others must not wait for what does not come
                failure = error
                payload = [type(error).__name__, str(error)]
        kind, result = self.agree(call, payload, call)
        if kind == "ok":
            return result
        if failure is not None:
            raise failure
        raise _error_named(kind)(f"{call} failed at {self.messages.names[0]}: {result}")

    def gather(self, call: str, data: bytes) -> list[bytes]:
        gathering = self.engine.start(blobs.gather(self.group, data, 0, wire.TAG_STATES), "states")
        self.wait_for(gathering, call)
        return gathering.result or []

    def scatter(self, call: str, parts: Sequence[bytes] | None) -> bytes:
        brought = parts if self.rank == 0 else None
        scattering = self.engine.start(blobs.scatter(self.group, brought, 0, wire.TAG_STATES), "states")
        self.wait_for(scattering, call)
        return scattering.result or b""


def _error_named(name: str) -> type[Exception]:
    from mpikv import errors  # noqa: PLC0415

    found = getattr(errors, name, None) or getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, (MpikvError, OSError)) else MpikvError
