"""The path "direct" for rounds of one key: all workers are on one host, and add in memory that they share.

It is used for pushes, and for calls that workers make at different times. Blocking calls that all workers make at the
same time use direct.py instead, with the same bits.

Value: in the shared memory, once for all workers. Who adds: each worker adds the shard that it owns, directly from the
arrays of all workers, in the order of the ranks. What is sent: nothing; counters in the shared memory show how far each
worker has come (collectives/one_host).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives import one_host
from mpikv.engine.operation import Steps
from mpikv.placement.labels import Comparison
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.key_path import SharedPath


class OneHostPath(SharedPath):
    """See `KeyPath`."""

    def broadcast(self) -> Steps[None]:
        """Wait until rank 0 has published that the value is in the shared memory."""
        if not self.broadcast_now():
            yield self._hosts.published(self._place)

    def broadcast_now(self) -> bool:
        """Publish the value at rank 0; other ranks check whether it is published. Not used for keys on a GPU."""
        if self._group.rank == 0:
            self._hosts.publish(self._place)
        return self._group.rank == 0 or self._hosts.is_published(self._place)

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Add this worker's shard. `values` are copied only if the others cannot read them in place."""
        rank, bounds = self._group.rank, self.placement.bounds
        return one_host.reduce_scatter(rank, values, bounds, self._key, combine=combine, comparison=comparison)

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Wait for the other owners, and copy the value to `outs`."""
        return one_host.allgather(self._group.rank, self.placement.bounds, self._key, outs)
