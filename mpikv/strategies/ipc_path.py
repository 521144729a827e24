"""The path "ipc": workers of one host, each with a GPU, add in each other's device memory.

Home: each worker has the whole value in its own device memory, where the others read it. Who adds: each worker the part
that it owns, straight from the device memory of all, in the order of the ranks. What is sent: nothing; counters in the
host's memory say how far each worker is (collectives/device_host).

Memory: the value; from the first round on as much again, for what the others add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mpikv.collectives import device_host
from mpikv.collectives.host_key import TOTALS
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.key_path import KeyPath, Means
from mpikv.strategies.staging import Staging


class IpcPath(KeyPath):
    """See `KeyPath`."""

    shared = True  # `end` writes to the caller's arrays

    def __init__(
        self, means: Means, info: KeyInfo, placement: Placement, place: Any, staging: Staging | None = None
    ) -> None:
        super().__init__(means, info, placement, place, staging)
        assert means.hosts is not None
        self._hosts, self._place = means.hosts, place
        self._device = cast(DeviceSpace, self._space)
        self.dtype = info.dtype  # widened by whoever adds
        self.value = self._device.shared_empty(info.n_elems, info.dtype)
        self._pushed: SpaceArray = None  # this worker's values, which the others read there; from the first round on
        self._key = means.hosts.key(place, info.n_elems, info.dtype, value=self.value, arrays=means.hosts.peers)

    @property
    def held_bytes(self) -> int:
        """The value, and what the others read."""
        return int(self.value.nbytes) * (1 if self._pushed is None else 2)

    def share(self) -> Steps[None]:
        """The others copy it from where worker 0 says that it is."""
        if self._group.rank == 0:
            self._key.name(TOTALS, self.value)
            yield self._device.stream_event()
            self._hosts.publish(self._place)
        else:
            yield self._hosts.published(self._place)
            self._device.copy(self.value, self._key.array_of(0, TOTALS, self.value.dtype))

    def begin(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """From where the others can read them."""
        if self._pushed is None:
            self._pushed = self._device.shared_empty(values.size, values.dtype)
        self._device.copy(self._pushed, values)
        return device_host.reduce_scatter(
            self._group.rank,
            self._pushed,
            self.placement.bounds,
            self._key,
            self._device,
            combine=combine,
            comparison=comparison,
        )

    def end(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Wait for the other owners, and copy their parts, and the value out."""
        return device_host.allgather(self._group.rank, self.placement.bounds, self._key, self._device, outs)
