"""The path "messages": the workers own the keys, and send messages, also within a host.

Value: each worker has a copy in its own memory. Who adds, in which order, and what is sent: the placement names the
algorithm that decides this (collectives/ring, naive, halving_doubling, hierarchical). Messages also contain the labels
that values were pushed under (collectives/labelled).

Cost: that of the algorithm. Memory: the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.select import ALGORITHMS
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.key_path import KeyPath, PathResources


class MessagePath(KeyPath):
    """See `KeyPath`."""

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(resources, info, placement, place)
        self.value = self._space.empty(info.n_elems, info.dtype)

    def broadcast(self) -> Steps[None]:
        """Broadcast by messages along a tree."""
        return broadcast(self._group, self.value, 0, self._tag(0))

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Add in `values`."""
        algorithm: Any = ALGORITHMS[self.placement.algorithm]
        group = self._groups(comparison)[0]
        steps: Steps[None] = algorithm.reduce_scatter(group, values, self.placement.bounds, self._tag(1), combine)
        return steps

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Receive into `value`."""
        algorithm: Any = ALGORITHMS[self.placement.algorithm]
        group = self._groups(comparison)[1]
        steps: Steps[None] = algorithm.allgather(group, self.value, self.placement.bounds, self._tag(2))
        return steps
