"""What codecs have in common in device memory that send some of the values: see sparse.py.

Cost: to encode four launches beside those that choose, and two passes over the values, where something is remembered;
else none. Two or three launches to decode beside those that find the positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.arrays import sum_dtype
from mpikv.codecs import shares
from mpikv.codecs.on_device import FLOAT32, Made, OnDevice, Pushed, finite, totals
from mpikv.spaces import routine
from mpikv.spaces.tracing import trace

if TYPE_CHECKING:
    from mpikv.spaces.device import DeviceSpace
    from mpikv.spaces.device_array import DeviceArray


@dataclass(frozen=True)
class SparseOnDevice(OnDevice):
    """See `OnDevice`. ratio: which share of the values is sent."""

    ratio: float

    @abstractmethod
    def _choose(
        self, space: DeviceSpace, pieces: Sequence[Pushed], totals: Sequence[DeviceArray], counts: Sequence[int]
    ) -> list[DeviceArray]:
        """Write what travels of each piece, and return the positions. totals: the values. counts: how many of them."""

    @abstractmethod
    def _sent(self, space: DeviceSpace, data: DeviceArray, out: DeviceArray, k: int) -> tuple[DeviceArray, DeviceArray]:
        """Return the positions and the values that were sent of a piece as long as `out`."""

    @cached_property
    def _kept(self) -> Made:
        """The residual, without what is not finite."""
        return trace(lambda residual: np.copyto(residual, finite(residual)), [FLOAT32])

    @cached_property
    def _nothing_added(self) -> Made:
        """The sum of what was not sent: as NumPy's, which makes -0.0 0.0."""

        def add(out: Any) -> None:
            out += 0.0

        return trace(add, [sum_dtype(self.dtype)])

    def encode(self, space: DeviceSpace, pieces: Sequence[Pushed]) -> None:
        """See `OnDevice`."""
        counts = [shares.count(self.ratio, one.values.size) for one in pieces]
        if not self.remembers:
            self._choose(space, pieces, [space.cast(one.values, FLOAT32) for one in pieces], counts)
            return
        program, numbers = totals(self.dtype)
        space.launch_many(program, [([one.residual, one.values], numbers) for one in pieces])
        found = self._choose(space, pieces, [one.residual for one in pieces], counts)
        zeros = space.zeros(max(counts, default=0), FLOAT32)
        taken = [([one.residual, at, zeros[:k]], [k]) for one, at, k in zip(pieces, found, counts, strict=True)]
        space.launch_many(routine.put(FLOAT32, FLOAT32), taken)
        program, numbers = self._kept
        space.launch_many(program, [([one.residual], numbers) for one in pieces])

    def decode(self, space: DeviceSpace, data: DeviceArray, out: DeviceArray, *, add: bool) -> None:
        """See `OnDevice`."""
        if not out.size:
            return
        k = shares.count(self.ratio, out.size)
        positions, values = self._sent(space, data, out, k)
        if add:
            sums = space.empty(k, out.dtype)
            space.launch(routine.sums(out.dtype), [out, positions, values, sums], [k])
            space.launch(self._nothing_added[0], [out], self._nothing_added[1])
            values = sums
        else:
            space.copy(out, 0)
        space.launch(routine.put(out.dtype, values.dtype), [out, positions, values], [k])
