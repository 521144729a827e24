"""The path "native": the workers own the keys, and MPI's own collectives move them (collectives/native).

Value: each worker has a copy in its own memory. Who adds: MPI, in an order that it chooses. What is sent: MPI's own
messages, and before them a gather of the workers' labels. Each key has its own communicator (communicators.py).

Cost: MPI's, a gather of 32 bytes for each round, and a communicator for each key. Memory: the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.collectives.broadcast import broadcast
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.key_path import KeyPath, PathResources


class NativePath(KeyPath):
    """See `KeyPath`."""

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(resources, info, placement, place)
        assert resources.communicators is not None
        self.value = self._space.empty(info.n_elems, info.dtype)
        self._communicators = resources.communicators
        self._comm: Any = None

    def broadcast(self) -> Steps[None]:
        """Broadcast by the store's own messages along a tree; then wait for the key's communicator."""
        yield from broadcast(self._group, self.value, 0, self._tag(0))
        self._comm = yield from self._communicators.of(self._key_id)

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Add in `values`, after the workers' labels have been compared."""
        native = self._communicators.native
        if comparison is not None:
            yield from native.compare(self._comm, comparison)
        yield from native.reduce_scatter(self._comm, values, self.placement.bounds, combine)
        return None

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Receive into `value`."""
        steps: Steps[None] = self._communicators.native.allgather(self._comm, self.value, self.placement.bounds)
        return steps
