"""A communicator for each key, which MPI's own collectives need (collectives/native).

MPI requires that all ranks make communicators in the same order, but a worker may learn of keys in any order. So they
are made one after another, in the order in which all workers agreed on the keys; of the workers alone, since servers do
not take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpikv.common.checks import shown
from mpikv.engine.engine import Engine
from mpikv.engine.operation import Predicate, Steps
from mpikv.engine.running import Running
from mpikv.errors import UnsupportedError
from mpikv.placement.keys import KeyInfo
from mpikv.transports.base import Transport


class Communicators:
    """The communicators of one worker's keys. native: the module `collectives.native`.

    Making it is collective over the workers, and blocks until each does: as part of `kv.create`, where all have just
    come.
    """

    def __init__(self, transport: Transport, workers: Sequence[int], engine: Engine) -> None:
        # Importing it initialises MPI, which thread ranks and `import mpikv` must not do.
        from mpikv.collectives import native  # noqa: PLC0415

        self.native: Any = native
        comm = getattr(transport, "comm", None)  # None: thread ranks
        self._workers: Any = None if comm is None else native.of_ranks(comm, workers)
        self._engine = engine
        self._made: dict[int, Running[Any]] = {}
        self._last: Running[Any] | None = None

    def agreed(self, info: KeyInfo) -> None:
        """Start to make the one of a key that all workers agreed on. To be called in the same order on all workers."""
        steps = self._duplicate_after(self._last)
        self._last = self._made[info.id] = self._engine.start(steps, f"communicator of key {shown(info.key)}")

    def _duplicate_after(self, before: Running[Any] | None) -> Steps[Any]:
        if before is not None:
            yield before
        if self._workers is None:
            raise UnsupportedError("MPIKV_ALGORITHM=native needs MPI")
        return (yield from self.native.duplicate(self._workers))

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
        if self._workers is not None:
            self._workers.Free()
