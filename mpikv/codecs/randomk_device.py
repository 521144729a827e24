"""The codec randomk in device memory: positions are drawn on the GPU, by whoever encodes and by whoever decodes.

The formulas of randomk.py. The number of the push is kept in host memory, and travels in front of the values.

Cost: three launches to choose, of work on the values that are sent alone.
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
        parts = [self._parts(one.data) for one in pieces]
        positions = [space.empty(k, routine.POSITION) for k in counts]
        sent, drawn, taken = [], [], []
        for one, (push, values), total, at, k in zip(pieces, parts, totals, positions, counts, strict=True):
            pushes = one.state["pushes"]
            sent.append(([push], [pushes.view(np.int64)[0]]))
            pushes += np.uint64(1)
            drawn.append(([total, push, at], [self._number, k]))
            taken.append(([total, at, values], [k]))
        space.launch_many(arithmetic.fill(routine.COUNT), sent)
        space.launch_many(selection.draw(FLOAT32), drawn)
        space.launch_many(routine.TAKE, taken)
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
