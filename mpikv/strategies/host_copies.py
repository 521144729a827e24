"""Copies of a key whose value is on a GPU, while its path adds in host memory: the path "host".

Value: each worker has a copy in its device memory, where the optimizer runs. Who adds, in which order, and what is
sent: the placement names a path on the host (`Placement.host`) that decides this, so the bits are those of that path.

A round copies the whole of this worker's values down to page-locked memory, the sum of the shard that it updates up,
the updated shard down, and the others' shards up. All copies are in the store's stream, so that each follows the work
before it. The host waits for those down by yielding an event, and for none of those up: it writes to the memory again
only when a later copy down is done.

Cost of a round of n elements, of which this worker updates k, beside that of the path: n + k elements copied down and n
up; where workers share memory, n more are copied on the host. Page-locked memory: n elements, kept with the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.transports.base import Group

if TYPE_CHECKING:
    from mpikv.strategies.key_path import KeyPath


def broadcast_first(space: DeviceSpace, group: Group, value: SpaceArray, tag: int) -> Steps[None]:
    """Broadcast a value from the GPU of rank 0 to those of all, by messages along a tree, through host memory."""
    on_host = space.page_locked(value.nbytes).view(value.dtype)
    if group.rank == 0:
        space.download(on_host, value)
        yield space.stream_event()
    yield from broadcast(group, on_host, 0, tag)
    if group.rank:
        space.upload(value, on_host)


class HostCopies:
    """The copies of one key. value: the key's array on the GPU; None: make one."""

    def __init__(self, space: DeviceSpace, info: KeyInfo, value: SpaceArray | None = None) -> None:
        self._space, self._n_elems, self._dtype = space, info.n_elems, info.dtype
        self.value = space.empty(info.n_elems, info.dtype) if value is None else value
        self._memory = space.page_locked(info.n_elems * sum_dtype(info.dtype).itemsize)

    @property
    def held_bytes(self) -> int:
        return self._memory.nbytes

    def on_host(self, dtype: np.dtype[Any] | None = None) -> HostArray:
        """The page-locked memory as (n,) of this dtype; default: the key's."""
        dtype = dtype or self._dtype
        return self._memory[: self._n_elems * dtype.itemsize].view(dtype)

    def broadcast(self, path: KeyPath, *, is_first: bool) -> Steps[None]:
        """Broadcast the value from the GPU of worker 0 to those of all. is_first: whether this is worker 0."""
        on_host = self.on_host()
        if is_first:
            yield from self._down(self.value)
            path.value[...] = on_host
        yield from path.broadcast()
        if not is_first:
            on_host[...] = path.value
            self._space.upload(self.value, on_host)

    def values(self, values: SpaceArray) -> Steps[HostArray]:
        yield from self._down(values)
        return self.on_host(values.dtype)

    def totals(self, totals: HostArray, updates: Span, values: SpaceArray, *, changeable: bool) -> SpaceArray:
        """Begin to copy the sum of the elements `updates` up; returns (n,). Into `values`, if they are changeable."""
        begin, end = updates
        on_device = values if changeable and values.dtype == totals.dtype else None
        if on_device is None:
            on_device = self._space.empty(self._n_elems, totals.dtype)
        own = self.on_host(totals.dtype)[begin:end]
        own[...] = totals[begin:end]
        self._space.upload(on_device[begin:end], own)
        return on_device

    def updated(self, path: KeyPath) -> Steps[tuple[HostArray, ...]]:
        """Copy the shard that this worker has updated down, and return the arrays that the path writes the value to."""
        if not path.sends_back:
            return ()
        begin, end = path.updates
        on_host = self.on_host()
        yield from self._down(self.value, (begin, end))
        path.value[begin:end] = on_host[begin:end]
        return (on_host,) if path.shared else ()

    def complete(self, path: KeyPath) -> None:
        """Begin to copy what the others have updated up."""
        on_host, (begin, end) = self.on_host(), path.updates
        self._space.upload(self.value[:begin], on_host[:begin])
        self._space.upload(self.value[end:], on_host[end:])

    def _down(self, array: SpaceArray, span: Span | None = None) -> Steps[None]:
        begin, end = span or (0, self._n_elems)
        self._space.download(self.on_host(array.dtype)[begin:end], array[begin:end])
        yield self._space.stream_event()
