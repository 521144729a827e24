"""The codec topk in device memory: the largest values are found, and written where they travel, by the GPU.

The formulas of topk.py. A piece that is sent as it is travels as by a codec of single elements.

Cost: seven passes over the values, one of them of the threads of one block only (spaces/routine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.arrays import HostArray, sum_dtype
from mpikv.codecs import shares
from mpikv.codecs.on_device import FLOAT32, Elements, Made, OnDevice, finite
from mpikv.spaces import routine
from mpikv.spaces.tracing import trace

if TYPE_CHECKING:
    from mpikv.codecs.sparse import Sparse
    from mpikv.spaces.device import DeviceSpace
    from mpikv.spaces.device_array import DeviceArray


@dataclass(frozen=True)
class Largest(OnDevice):
    """See `OnDevice`. codec: on the host. ratio, whole_elems: its own."""

    codec: Sparse
    ratio: float
    whole_elems: int

    @cached_property
    def _whole(self) -> Elements:
        """Of pieces that are sent as they are."""
        return Elements(self.dtype, self.remembers, FLOAT32, lambda v: v.astype(FLOAT32, copy=False), lambda data: data)

    @cached_property
    def _totals(self) -> Made:
        """residual, values: what is owed becomes what is pushed."""

        def add(residual: Any, values: Any) -> None:
            residual += values.astype(FLOAT32, copy=False)

        return trace(add, [FLOAT32, self.dtype])

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

    def _sent(self, data: DeviceArray, k: int) -> tuple[DeviceArray, DeviceArray]:
        """Positions and values where they travel."""
        bound = k * routine.POSITION.itemsize
        return data[:bound].view(routine.POSITION), data[bound:].view(FLOAT32)

    def encode(self, space: DeviceSpace, values: DeviceArray, data: DeviceArray, owed: Sequence[DeviceArray]) -> None:
        """See `OnDevice`."""
        if values.size <= self.whole_elems:
            self._whole.encode(space, values, data, owed)
            return
        if not values.size:
            return
        for residual in owed:
            space.launch(self._totals[0], [residual, values], self._totals[1])
        total = owed[0] if owed else space.cast(values, FLOAT32)
        k = shares.count(self.ratio, values.size)
        positions, found = self._sent(data, k)
        space.launch(routine.LARGEST, [total, positions, found], [k])
        for residual in owed:
            zeros = space.zeros(k, FLOAT32)
            space.launch(routine.put(FLOAT32, FLOAT32), [residual, positions, zeros], [k])
            space.launch(self._kept[0], [residual], self._kept[1])

    def decode(self, space: DeviceSpace, data: DeviceArray, out: DeviceArray, *, add: bool) -> None:
        """See `OnDevice`."""
        if out.size <= self.whole_elems:
            self._whole.decode(space, data, out, add=add)
            return
        if not out.size:
            return
        k = shares.count(self.ratio, out.size)
        positions, values = self._sent(data, k)
        if add:
            sums = space.empty(k, out.dtype)
            space.launch(routine.sums(out.dtype), [out, positions, values, sums], [k])
            space.launch(self._nothing_added[0], [out], self._nothing_added[1])
            values = sums
        else:
            space.copy(out, 0)
        space.launch(routine.put(out.dtype, values.dtype), [out, positions, values], [k])

    def check(self, data: HostArray, n_elems: int) -> None:
        """See `OnDevice`: positions that cannot be."""
        self.codec.sent(data, n_elems)
