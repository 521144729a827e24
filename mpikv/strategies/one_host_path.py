"""The path "direct" of a key by itself: all workers are on one host, and add in memory that they share.

Calls that all workers make together are done together (direct.py). This is what pushes do, and calls that workers make
at different times; the bits are the same.

Home: the value is in the shared memory, once for all workers. Who adds: each worker the part that it owns, straight
from where all workers have their values, in the order of the ranks. What is sent: nothing; counters in the memory say
how far each worker is (collectives/one_host).
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

    def share(self) -> Steps[None]:
        """The value is in the memory: the others are told that it is."""
        if not self.share_now():
            yield self._hosts.published(self._place)

    def share_now(self) -> bool:
        """The others look whether they have been told. Not where the value has to be copied from a GPU first."""
        if self._group.rank == 0:
            self._hosts.publish(self._place)
        return self._group.rank == 0 or self._hosts.is_published(self._place)

    def begin(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """From where the values are, if the others can read them there."""
        return one_host.reduce_scatter(
            self._group.rank,
            values,
            self.placement.bounds,
            self._key,
            combine=combine,
            comparison=comparison,
            pipeline=self._parts,
        )

    def end(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Wait for the other owners, and copy the value out."""
        return one_host.allgather(self._group.rank, self.placement.bounds, self._key, outs, pipeline=self._parts)
