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
from mpikv.collectives.pipeline import load_first
from mpikv.collectives.select import ALGORITHMS, PIPELINED
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.key_path import KeyPath, PathResources
from mpikv.strategies.staging import Staging


class MessagePath(KeyPath):
    """See `KeyPath`."""

    def __init__(
        self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any, staging: Staging | None = None
    ) -> None:
        super().__init__(resources, info, placement, place, staging)
        self.value = self._space.empty(info.n_elems, info.dtype)

    def broadcast(self) -> Steps[None]:
        """Broadcast by messages along a tree."""
        return broadcast(self._group, self.value, 0, self._tag(0))

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Add in `values`."""
        algorithm: Any = ALGORITHMS[self.placement.algorithm]
        arguments = self._groups(comparison)[0], values, self.placement.bounds, self._tag(1), combine
        if self.placement.algorithm in PIPELINED:
            steps: Steps[None] = algorithm.reduce_scatter(*arguments, pipeline=self._parts)
            return steps
        return load_first(
            self._parts, algorithm.reduce_scatter(*arguments), values, needed=(0, values.size), completed=[self.owned]
        )

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Receive into `value`."""
        algorithm: Any = ALGORITHMS[self.placement.algorithm]
        arguments = self._groups(comparison)[1], self.value, self.placement.bounds, self._tag(2)
        if self.placement.algorithm in PIPELINED:
            steps: Steps[None] = algorithm.allgather(*arguments, pipeline=self._parts)
            return steps
        return load_first(
            self._parts, algorithm.allgather(*arguments), self.value, needed=self.owned, completed=self._others()
        )
