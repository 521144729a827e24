"""The path "mpi": a key's value is on a GPU, and MPI sends it from there and receives it there (CUDA-aware MPI).

Value: each worker has a copy in its device memory. Who adds, in which order, and what is sent: as on the path "ring",
but on the GPU, so the bits are the same. The store copies no value to host memory;
MPI may do so with the addresses that it gets. The store uses MPI's send and receive only, none of its reductions.

Labels. If a message had labels behind its values, the GPU would have to write and read them, and the host would have to
wait for it. So where labels are compared at all, workers send them in short messages from host memory before each round
(collectives/label_exchange.py).

Cost for p workers: that of the ring, an event of the stream for each message, and ceil(log2(p)) short messages one
after another in each round whose labels are compared. Memory: the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mpikv.collectives import label_exchange
from mpikv.collectives.device_group import DeviceGroup
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.key_path import PathResources
from mpikv.strategies.message_path import RingPath


class MpiPath(RingPath):
    """See `KeyPath`."""

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(resources, info, placement, place)
        self._of_labels = resources.group
        device = cast(DeviceSpace, self._space)
        self._group = DeviceGroup(self._of_labels.transport, self._of_labels.ranks, device)

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Add in `values`, after labels have been compared."""
        if comparison is not None:
            # With the tag of the messages that follow, as MPI keeps the order of messages between two ranks.
            yield from label_exchange.compare(self._of_labels, comparison, self._tag(1))
        return (yield from super().reduce_scatter(values, combine, None, changeable=changeable))

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Receive into `value`. `reduce_scatter` has compared the labels already."""
        return super().allgather(outs, None)
