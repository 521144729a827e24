"""The path "host": a key's value is on a GPU, and a path on the host adds it.

Value: each worker has a copy in its device memory, where the optimizer runs. Who adds, in which order, and what is
sent: the path on the host decides this (`Placement.host`), so the bits are those of that path.

A round copies the whole of this worker's values down to page-locked memory, the sum of the shard that it updates up,
the updated shard down, and the others' shards up. All copies are in the store's stream, so that each follows the work
before it. The host waits for those down by yielding an event, and for none of those up: it writes to the memory again
only when a later copy down is done.

Cost of a round of n elements, of which this worker updates k, beside that of the path: n + k elements copied down and n
up; where workers share memory, n more are copied on the host. Page-locked memory: n elements, kept with the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.key_path import KeyPath, PathResources


class CopiedPath(KeyPath):
    """See `KeyPath`. inner: the kind of the path on the host."""

    overwrites = False  # of the pushed values only their copies

    def __init__(
        self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any, inner: type[KeyPath]
    ) -> None:
        super().__init__(resources, info, placement, place)
        self._device = cast(DeviceSpace, resources.spaces.of(info))
        self.value = self._device.empty(info.n_elems, info.dtype)
        self._memory = self._device.page_locked(info.n_elems * sum_dtype(info.dtype).itemsize)
        self._inner = inner(resources, info, placement, place)
        if not self._inner.shared:
            self._inner.value = self._on_host(info.dtype)

    @property
    def held_bytes(self) -> int:
        return self._memory.nbytes + self._inner.held_bytes

    def reshard(self, placement: Placement) -> None:
        super().reshard(placement)
        self._inner.reshard(placement)

    def _on_host(self, dtype: np.dtype[Any]) -> HostArray:
        """The page-locked memory as (n,) of this dtype."""
        return self._memory[: self._info.n_elems * dtype.itemsize].view(dtype)

    def _down(self, array: SpaceArray, span: Span) -> Steps[None]:
        begin, end = span
        self._device.download(self._on_host(array.dtype)[begin:end], array[begin:end])
        yield self._device.stream_event()

    def broadcast(self) -> Steps[None]:
        inner, on_host = self._inner, self._on_host(self._info.dtype)
        if self._group.rank == 0:
            yield from self._down(self.value, (0, self._info.n_elems))
            inner.value[...] = on_host
        yield from inner.broadcast()
        if self._group.rank:
            on_host[...] = inner.value
            self._device.upload(self.value, on_host)

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        on_host = self._on_host(values.dtype)
        yield from self._down(values, (0, self._info.n_elems))
        totals = yield from self._inner.reduce_scatter(on_host, combine, comparison, changeable=True)
        totals = on_host if totals is None else totals
        on_device = values if changeable and values.dtype == totals.dtype else None
        if on_device is None:
            on_device = self._device.empty(self._info.n_elems, totals.dtype)
        begin, end = self.updates
        own = self._on_host(totals.dtype)[begin:end]
        own[...] = totals[begin:end]
        self._device.upload(on_device[begin:end], own)
        return on_device

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        (begin, end), inner, on_host = self.updates, self._inner, self._on_host(self._info.dtype)
        yield from self._down(self.value, (begin, end))
        inner.value[begin:end] = on_host[begin:end]
        yield from inner.allgather((on_host,) if inner.shared else (), comparison)
        self._device.upload(self.value[:begin], on_host[:begin])
        self._device.upload(self.value[end:], on_host[end:])
