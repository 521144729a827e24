"""The path "native": the workers own the keys, and MPI's own collectives move them (collectives/native).

Home: each worker has the whole value in memory of its own. Who adds: MPI, in an order of its own. What is sent: what
MPI sends, and the workers' labels, gathered before. Each key has a communicator of its own (communicators.py).

Cost: MPI's, a gather of 32 bytes for each round, and a communicator for each key. Memory: the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.pipeline import load_first
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.key_path import KeyPath, Means
from mpikv.strategies.staging import Staging


class NativePath(KeyPath):
    """See `KeyPath`."""

    def __init__(
        self, means: Means, info: KeyInfo, placement: Placement, place: Any, staging: Staging | None = None
    ) -> None:
        super().__init__(means, info, placement, place, staging)
        assert means.communicators is not None
        self.value = self._space.empty(info.n_elems, info.dtype)
        self._communicators = means.communicators
        self._comm: Any = None

    def share(self) -> Steps[None]:
        """By a tree of messages of ours; then the key waits for its communicator."""
        yield from broadcast(self._group, self.value, 0, self._tag(0))
        self._comm = yield from self._communicators.of(self._key_id)

    def begin(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """In place, with the workers' labels compared before."""
        steps = self._add(values, combine, comparison)
        return load_first(self._parts, steps, values, needed=(0, values.size), completed=[self.owned])

    def _add(self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None) -> Steps[SpaceArray | None]:
        native = self._communicators.native
        if comparison is not None:
            yield from native.compare(self._comm, comparison)
        yield from native.reduce_scatter(self._comm, values, self.placement.bounds, combine)
        return None

    def end(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """In place."""
        steps: Steps[None] = self._communicators.native.allgather(self._comm, self.value, self.placement.bounds)
        return load_first(self._parts, steps, self.value, needed=self.owned, completed=self._others())
