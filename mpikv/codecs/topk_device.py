"""The codec topk in device memory: the largest values are found, and written where they travel, by the GPU.

The formulas of topk.py. A piece that is sent as it is travels as by a codec of single elements.

Cost: some nine passes over the values, six of them by one block of threads for each piece (spaces/routine.py); the
pieces of a push are worked on side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.arrays import HostArray, sum_dtype
from mpikv.codecs import shares
from mpikv.codecs.on_device import FLOAT32, Elements, Made, OnDevice, Pushed, finite
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

    def encode(self, space: DeviceSpace, pieces: Sequence[Pushed]) -> None:
        """See `OnDevice`."""
        self._whole.encode(space, [one for one in pieces if one.values.size <= self.whole_elems])
        chosen = [one for one in pieces if one.values.size > self.whole_elems]
        counts = [shares.count(self.ratio, one.values.size) for one in chosen]
        if self.remembers:
            program, numbers = self._totals
            space.launch_many(program, [([*one.owed, one.values], numbers) for one in chosen])
        totals = [one.owed[0] if self.remembers else space.cast(one.values, FLOAT32) for one in chosen]
        sent = [self._sent(one.data, k) for one, k in zip(chosen, counts, strict=True)]
        found = zip(totals, sent, counts, strict=True)
        space.launch_many(routine.LARGEST, [([total, *both], [k]) for total, both, k in found])
        if self.remembers:
            zeros = space.zeros(max(counts, default=0), FLOAT32)
            taken = [([*one.owed, at, zeros[:k]], [k]) for one, (at, _), k in zip(chosen, sent, counts, strict=True)]
            space.launch_many(routine.put(FLOAT32, FLOAT32), taken)
            program, numbers = self._kept
            space.launch_many(program, [(one.owed, numbers) for one in chosen])

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
