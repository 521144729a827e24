"""The path "mpi": a key's value is on a GPU, and MPI sends it from there and receives it there (CUDA-aware MPI).

Home: each worker has the whole value in its device memory. Who adds, in which order, and what is sent: as on the path
"messages", by the same algorithms, on the GPU: the same bits. No value passes through the host's memory as far as the
store is concerned; what MPI does with an address that it is given is MPI's business. Only send and receive are asked of
it, none of its reductions.

Labels. A note behind the values of a message would have to be written and read on the GPU, and waited for. So where
labels are compared at all, workers tell each other theirs in short messages of host memory before each round
(collectives/label_exchange.py).

Cost for p workers: that of the algorithm, an event of the stream for each message, and ceil(log2(p)) short messages one
after another in each round whose labels are compared. Memory: the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mpikv.collectives import label_exchange
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.device_group import DeviceGroup
from mpikv.collectives.select import ALGORITHMS
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.key_path import KeyPath, Means
from mpikv.strategies.staging import Staging


class MpiPath(KeyPath):
    """See `KeyPath`."""

    def __init__(
        self, means: Means, info: KeyInfo, placement: Placement, place: Any, staging: Staging | None = None
    ) -> None:
        super().__init__(means, info, placement, place, staging)
        self.value = self._space.empty(info.n_elems, info.dtype)
        self._group = means.plain_group or means.group
        self._device = cast(DeviceSpace, self._space)
        self._device_group = DeviceGroup(self._group.transport, self._group.ranks, self._device)

    def share(self) -> Steps[None]:
        """By a tree."""
        return broadcast(self._device_group, self.value, 0, self._tag(0))

    def begin(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """In place."""
        group = self._device_group
        if comparison is not None:
            # Under the tag of the messages that follow: those between two ranks stay in their order.
            yield from label_exchange.compare(self._group, comparison, self._tag(1))
        algorithm: Any = ALGORITHMS[self.placement.algorithm]
        yield from algorithm.reduce_scatter(group, values, self.placement.bounds, self._tag(1), combine)
        return None

    def end(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """In place. All know already what is to be known of labels."""
        algorithm: Any = ALGORITHMS[self.placement.algorithm]
        steps: Steps[None] = algorithm.allgather(self._device_group, self.value, self.placement.bounds, self._tag(2))
        return steps
