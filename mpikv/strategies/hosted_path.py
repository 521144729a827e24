"""The path "hosted": workers are on several hosts, and the workers of a host add in memory that they share.

Home: the value is in that memory, once for each host. Who adds: within a host one worker for each ring of hosts, from
where the workers of the host have their values; then around the ring, from host to host, in the order that
collectives/hierarchical fixes. What is sent: sums and results between hosts alone, with what the messages of
`MessagePath` say of labels (collectives/hosted).
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

    def share(self) -> Steps[None]:
        """By a tree over one rank of each host."""
        return hosted.share(self._group, self._key, self._tag(0))

    def begin(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """From where the values are, if the others of the host can read them there."""
        return hosted.reduce_scatter(
            self._groups(comparison)[0],
            values,
            self.placement.bounds,
            self._tag(1),
            self._key,
            changeable=changeable,
            combine=combine,
            comparison=comparison,
            pipeline=self._parts,
        )

    def end(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """The value is completed once for each host, and copied out as it comes."""
        group = self._groups(comparison)[1]
        return hosted.allgather(group, self.placement.bounds, self._tag(2), self._key, outs, pipeline=self._parts)
