"""The paths "ring", "mpi" and "native": each worker has the value in its own memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mpikv.collectives import labelled, ring
from mpikv.collectives.device_group import DeviceGroup
from mpikv.common.checks import shown
from mpikv.engine.engine import Engine
from mpikv.engine.operation import Predicate, Steps
from mpikv.engine.running import Running
from mpikv.errors import UnsupportedError
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.key_path import KeyPath, PathResources
from mpikv.transports.base import Transport


class RingPath(KeyPath):
    """A ring of all workers, also within a host (collectives/ring)."""

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        return ring.reduce_scatter(self._groups(comparison)[0], values, self.placement.bounds, self._tag(1), combine)

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        return ring.allgather(self._groups(comparison)[1], self.value, self.placement.bounds, self._tag(2))


class MpiPath(RingPath):
    """The same ring of values on GPUs, which MPI sends from there and receives there (CUDA-aware MPI).

    The additions are made on the GPU, with the same bits, and none of MPI's reductions is used. If a message had labels
    behind its values, the host would have to wait for the GPU to read them. So where labels are compared at all,
    workers send them in short messages from host memory before each round.

    Cost for p workers, beside that of the ring: an event of the stream for each message, and ceil(log2(p)) short
    messages one after another in each round whose labels are compared.
    """

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(resources, info, placement, place)
        self._of_labels = resources.group
        device = cast(DeviceSpace, self._space)
        self._group = DeviceGroup(self._of_labels.transport, self._of_labels.ranks, device)

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        if comparison is not None:
            # With the tag of the messages that follow, as MPI keeps the order of messages between two ranks.
            yield from labelled.compare(self._of_labels, comparison, self._tag(1))
        return (yield from super().reduce_scatter(values, combine, None, changeable=changeable))

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        return super().allgather(outs, None)


class NativePath(KeyPath):
    """MPI's own collectives (collectives/native), which add in an order that MPI chooses, and gather labels before."""

    _comm: Any = None

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        communicators = self._resources.communicators
        assert communicators is not None
        native = self._native = communicators.native
        if self._comm is None:
            self._comm = yield from communicators.of(self._info.id)
        if comparison is not None:
            yield from native.compare(self._comm, comparison)
        yield from native.reduce_scatter(self._comm, values, self.placement.bounds, combine)
        return None

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        steps: Steps[None] = self._native.allgather(self._comm, self.value, self.placement.bounds)
        return steps


class Communicators:
    """A communicator of one worker for each key, which MPI's own collectives need. native: that module.

    MPI requires that all ranks make communicators in the same order, but a worker may learn of keys in any order. So
    they are made one after another, in the order in which all workers agreed on the keys; of the workers alone.

    Making it is collective over the workers, and blocks until each does: as part of `kv.create`, where all have come.
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
