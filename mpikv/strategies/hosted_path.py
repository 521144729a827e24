"""The path "hosted": workers are on several hosts, and the workers of a host add in memory that they share.

Value: in that memory, once for each host. Who adds: several rings of ranks connect the hosts; each ring has one rank of
each host. On each host the rank of a ring adds the values of the host's workers, in place; then sums are added from
host to host around the ring, in the order that collectives/hierarchical fixes. What is sent: sums and results between
hosts only, with labels as in the messages of `MessagePath` (collectives/hosted).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives import hosted
from mpikv.engine.operation import Steps
from mpikv.placement.labels import Comparison
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.key_path import SharedPath


class HostedPath(SharedPath):
    """See `KeyPath`."""

    def broadcast(self) -> Steps[None]:
        """Broadcast by messages along a tree of one rank of each host."""
        return hosted.share(self._group, self._key, self._tag(0))

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Add. `values` are copied only if the others of the host cannot read them in place."""
        return hosted.reduce_scatter(
            self._groups(comparison)[0],
            values,
            self.placement.bounds,
            self._tag(1),
            self._key,
            changeable=changeable,
            combine=combine,
            comparison=comparison,
        )

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Complete the value once for each host, and copy each segment to `outs` as soon as it is complete."""
        group = self._groups(comparison)[1]
        return hosted.allgather(group, self.placement.bounds, self._tag(2), self._key, outs)
