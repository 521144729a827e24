"""The codec randomk in device memory: positions are drawn on the GPU, by whoever encodes and by whoever decodes.

The formulas of randomk.py. The number of the push is kept in host memory, and travels in front of the values.

Cost: six launches to encode, and two passes over the values; none where nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpikv.codecs.on_device import FLOAT32, Pushed
from mpikv.codecs.sparse_device import SparseOnDevice
from mpikv.spaces import arithmetic, routine, selection

if TYPE_CHECKING:
    from mpikv.spaces.device import DeviceSpace
    from mpikv.spaces.device_array import DeviceArray

_PUSH_BYTES = routine.COUNT.itemsize


@dataclass(frozen=True)
class Drawn(SparseOnDevice):
    """See `OnDevice`. mixed: `selection.mix` of the seed."""

    mixed: int

    def _choose(
        self, space: DeviceSpace, pieces: Sequence[Pushed], totals: Sequence[DeviceArray], counts: Sequence[int]
    ) -> list[DeviceArray]:
        pushes, values = zip(*(self._parts(one.data) for one in pieces), strict=True) if pieces else ((), ())
        numbers = []
        for one in pieces:
            state = one.state["pushes"]
            numbers.append([state.view(np.int64)[0]])
            state += np.uint64(1)
        space.launch_many(arithmetic.fill(routine.COUNT), [([to], n) for to, n in zip(pushes, numbers, strict=True)])
        positions = [space.empty(k, routine.POSITION) for k in counts]
        drawn = zip(totals, pushes, positions, counts, strict=True)
        space.launch_many(selection.draw(FLOAT32), [(list(arrays), [self._number, k]) for *arrays, k in drawn])
        taken = zip(totals, positions, values, counts, strict=True)
        space.launch_many(routine.TAKE, [(list(arrays), [k]) for *arrays, k in taken])
        return positions

    def _sent(self, space: DeviceSpace, data: DeviceArray, out: DeviceArray, k: int) -> tuple[DeviceArray, DeviceArray]:
        push, values = self._parts(data)
        positions = space.empty(k, routine.POSITION)
        space.launch(selection.draw(out.dtype), [out, push, positions], [self._number, k])
        return positions, values

    def _parts(self, data: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        """The number of the push, and the values."""
        return data[:_PUSH_BYTES].view(routine.COUNT), data[_PUSH_BYTES:].view(FLOAT32)

    @property
    def _number(self) -> int:
        """Its 64 bits as a number with a sign."""
        return self.mixed - (1 << 64) if self.mixed >> 63 else self.mixed
