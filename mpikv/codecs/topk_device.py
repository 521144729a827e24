"""The codec topk in device memory: the largest values are found, and written where they travel, by the GPU.

The formulas of topk.py. A piece that is sent as it is travels as by a codec of single elements.

Cost: some nine passes over the values, six of them by one block of threads for each piece (spaces/routine.py); the
pieces of a push are worked on side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mpikv.arrays import HostArray
from mpikv.codecs.on_device import FLOAT32, Elements, Pushed
from mpikv.codecs.sparse_device import SparseOnDevice
from mpikv.spaces import routine, selection

if TYPE_CHECKING:
    from mpikv.codecs.sparse import Sparse
    from mpikv.spaces.device import DeviceSpace
    from mpikv.spaces.device_array import DeviceArray


@dataclass(frozen=True)
class Largest(SparseOnDevice):
    """See `OnDevice`. whole_elems, codec: of the codec on the host, and itself."""

    whole_elems: int
    codec: Sparse

    @cached_property
    def _whole(self) -> Elements:
        """Of pieces that are sent as they are."""
        return Elements(self.dtype, self.remembers, FLOAT32, lambda v: v.astype(FLOAT32, copy=False), lambda data: data)

    def encode(self, space: DeviceSpace, pieces: Sequence[Pushed]) -> None:
        """See `OnDevice`."""
        self._whole.encode(space, [one for one in pieces if one.values.size <= self.whole_elems])
        super().encode(space, [one for one in pieces if one.values.size > self.whole_elems])

    def decode(self, space: DeviceSpace, data: DeviceArray, out: DeviceArray, *, add: bool) -> None:
        """See `OnDevice`."""
        if out.size <= self.whole_elems:
            self._whole.decode(space, data, out, add=add)
        else:
            super().decode(space, data, out, add=add)

    def check(self, data: HostArray, n_elems: int) -> None:
        """See `OnDevice`: positions that cannot be."""
        self.codec.sent(data, n_elems)

    def _choose(
        self, space: DeviceSpace, pieces: Sequence[Pushed], totals: Sequence[DeviceArray], counts: Sequence[int]
    ) -> list[DeviceArray]:
        sent = [self._parts(one.data, k) for one, k in zip(pieces, counts, strict=True)]
        found = zip(totals, sent, counts, strict=True)
        space.launch_many(selection.LARGEST, [([total, *both], [k]) for total, both, k in found])
        return [positions for positions, _ in sent]

    def _sent(self, space: DeviceSpace, data: DeviceArray, out: DeviceArray, k: int) -> tuple[DeviceArray, DeviceArray]:
        return self._parts(data, k)

    def _parts(self, data: DeviceArray, k: int) -> tuple[DeviceArray, DeviceArray]:
        """Positions and values where they travel."""
        bound = k * routine.POSITION.itemsize
        return data[:bound].view(routine.POSITION), data[bound:].view(FLOAT32)
