"""The path "ipc": workers of one host, each with a GPU, add in each other's device memory.

Value: each worker has a copy in its own device memory, which the others can read. Who adds: each worker adds the shard
that it owns, directly from the device memory of all, in the order of the ranks. What is sent: nothing; counters in the
host's memory show how far each worker has come (collectives/device_host).

Memory: the value, and from the first round on as much again for this worker's pushed values.
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
from mpikv.strategies.key_path import KeyPath, PathResources
from mpikv.strategies.staging import Staging


class IpcPath(KeyPath):
    """See `KeyPath`."""

    shared = True  # `allgather` writes to the caller's arrays

    def __init__(
        self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any, staging: Staging | None = None
    ) -> None:
        super().__init__(resources, info, placement, place, staging)
        assert resources.hosts is not None
        self._hosts, self._place = resources.hosts, place
        self._device = cast(DeviceSpace, self._space)
        self.dtype = info.dtype  # whoever adds converts it to a wider one
        self.value = self._device.shared_empty(info.n_elems, info.dtype)
        self._pushed: SpaceArray = None  # where the others read this worker's values; made by the first round
        self._key = resources.hosts.key(place, info.n_elems, info.dtype, value=self.value, arrays=resources.hosts.peers)

    @property
    def held_bytes(self) -> int:
        """The value, and the buffer of pushed values."""
        return int(self.value.nbytes) * (1 if self._pushed is None else 2)

    def broadcast(self) -> Steps[None]:
        """Worker 0 publishes the address of its value, and the others copy it from there."""
        if self._group.rank == 0:
            self._key.publish(TOTALS, self.value)
            yield self._device.stream_event()
            self._hosts.publish(self._place)
        else:
            yield self._hosts.published(self._place)
            self._device.copy(self.value, self._key.array_of(0, TOTALS, self.value.dtype))

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Copy `values` to where the others can read them, then add this worker's shard."""
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

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Wait for the other owners, copy their shards to `value`, and the value to `outs`."""
        return device_host.allgather(self._group.rank, self.placement.bounds, self._key, self._device, outs)
