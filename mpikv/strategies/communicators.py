"""A communicator for each key, which MPI's own collectives need (collectives/native).

MPI requires that all ranks make communicators in the same order, but a worker may learn of keys in any order. So they
are made one after another, in the order in which all workers agreed on the keys.
"""

from __future__ import annotations

from typing import Any

from mpikv.common.checks import shown
from mpikv.engine.engine import Engine
from mpikv.engine.operation import Predicate, Steps
from mpikv.engine.running import Running
from mpikv.errors import UnsupportedError
from mpikv.placement.keys import KeyInfo
from mpikv.transports.base import Transport


class Communicators:
    """The communicators of one worker's keys. native: the module `collectives.native`."""

    def __init__(self, transport: Transport, engine: Engine) -> None:
        # Importing it initialises MPI, which thread ranks and `import mpikv` must not do.
        from mpikv.collectives import native  # noqa: PLC0415

        self.native: Any = native
        self._transport, self._engine = transport, engine
        self._made: dict[int, Running[Any]] = {}
        self._last: Running[Any] | None = None

    def agreed(self, info: KeyInfo) -> None:
        """Start to make the one of a key that all workers agreed on. To be called in the same order on all workers."""
        steps = self._duplicate_after(self._last)
        self._last = self._made[info.id] = self._engine.start(steps, f"communicator of key {shown(info.key)}")

    def _duplicate_after(self, before: Running[Any] | None) -> Steps[Any]:
        if before is not None:
            yield before
        comm = getattr(self._transport, "comm", None)
        if comm is None:
            raise UnsupportedError("MPIKV_ALGORITHM=native needs MPI")
        return (yield from self.native.duplicate(comm))

    def of(self, key_id: int) -> Steps[Any]:
        """Wait for the communicator of a key. `init` may return before all workers have agreed on the key."""
        yield Predicate(lambda: key_id in self._made)
        yield self._made[key_id]
        return self._made[key_id].result

    def all_made(self) -> bool:
        """Whether all are complete. MPI must not be finalized before, even if no round has needed them."""
        return all(running.done for running in self._made.values())

    def free(self) -> None:
        """Free all of them, when all are complete. Collective."""
        for running in self._made.values():
            if running.result is not None:
                running.result.Free()
