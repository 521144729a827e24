"""The path of rounds with `op="adasum"`: the workers send each other messages, and each has the whole result.

A key has this path beside its usual one, whichever that is, and both have the same array for the value. No optimizer
updates the result, so it needs no owners: each worker writes all of it to the array. Where that is in memory which the
workers of a host share, all of them write the same bytes. They need not wait for each other there: no worker ends a
round before all have begun it, and a worker that has begun a round does not read the value of the last one any more.

Labels are not compared: they would differ in the op alone, and a worker with another op is on another path. The tag is
one that no other path uses, so both workers wait until their time is over, and the errors name the op.

Cost: that of collectives/adasum.py, and a copy into the value. Keys on a GPU are copied down and up
(host_copies.py). Memory: where the caller's values must not be changed, a copy of them; of keys on a GPU page-locked
memory, kept with the key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpikv.collectives import adasum
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.key_path import KeyPath, PathResources


class WholePath(KeyPath):
    """See `KeyPath`. value: the array of the key's usual path."""

    sends_back = False

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, value: SpaceArray) -> None:
        super().__init__(resources, info, placement, None)
        self.value, self._n_elems = value, info.n_elems

    @property
    def updates(self) -> Span:
        """All elements."""
        return 0, self._n_elems

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Combine in `values`, or in a copy of them."""
        buf = values if changeable else values.copy()
        yield from adasum.allreduce(self._group, buf, self._tag(3))
        return buf

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Send nothing: the value is complete."""
        yield from ()
        for out in outs:
            out[...] = self.value
