"""A communicator for each key, which MPI's own collectives need (collectives/native).

MPI wants communicators to be made in the same order on all ranks, and keys may become known in any order. So they are
made one after another, in the order in which all workers agreed on the keys.
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
    """Those of one worker. native: the module of the collectives."""

    def __init__(self, transport: Transport, engine: Engine) -> None:
        # Importing it initialises MPI, which thread ranks and `import mpikv` must not do.
        from mpikv.collectives import native  # noqa: PLC0415

        self.native: Any = native
        self._transport, self._engine = transport, engine
        self._made: dict[int, Running[Any]] = {}
        self._last: Running[Any] | None = None

    def agreed(self, info: KeyInfo) -> None:
        """Make one for a key that all workers agreed on. To be called in the same order on all of them."""
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
        """Wait for a key's. Not all workers may have agreed on the key by now, though its `init` has returned."""
        yield Predicate(lambda: key_id in self._made)
        yield self._made[key_id]
        return self._made[key_id].result

    def all_made(self) -> bool:
        """Whether none is being made any more. MPI must not end before, even if no round has needed them."""
        return all(running.done for running in self._made.values())

    def free(self) -> None:
        """Give all back, once they are made. Collective."""
        for running in self._made.values():
            if running.result is not None:
                running.result.Free()
