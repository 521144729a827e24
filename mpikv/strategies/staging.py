"""The copies of a key whose value is on a GPU while its path adds in host memory: the path "staged".

Home: each worker has the whole value in its device memory, where the optimizer runs. Who adds, in which order, and what
is sent: as the path on the host does that the placement names beside "staged" (`Placement.host`): the same bits.

A round copies this worker's values down, into host memory that the path adds from where it is: memory that the ranks of
the host share, or, for messages, page-locked memory that is kept with the key. The sum of the owned part comes up to
the device; the updated part goes down; and what the others own of the new value comes up. Casts to the dtype of the
sums are made on the device, before.

A long value does this segment by segment (collectives/segments.py): what the path needs first goes down first and is
sent, or counted as readable, as soon as it is there, while the next segments are on their way; what is complete comes
up while others still go down. The algorithms `ring` and those through memory work so. The others, which are for short
values or for hosts whose ranks share no memory, begin when all is down.

Order. Copies down are in the store's stream, copies up of long values in a second one. At the end of each half of a
round the store's stream waits for what was begun in the second one. So the first copy down of a round is behind all
that the round before has begun, and no other rank learns of a round before this one has seen that copy done. Memory of
the host that the round before reads or writes is free by then. Nothing waits but by yielded requests.

Cost of a round, n elements of which this worker owns k: n and k down, k and n - k up, beside the cost of the path.
Page-locked: the value and two arrays of n, or fewer where workers share memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.collectives.segments import Segments
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.host import HostSpace
from mpikv.spaces.pinned import Pinned
from mpikv.strategies.host_keys import HostKeys


class PinnedSpace(HostSpace):
    """Host memory whose arrays are page-locked."""

    def __init__(self, pinned: Pinned) -> None:
        super().__init__()
        self._pinned = pinned

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """See `Space`."""
        return self._pinned.take(n_elems * dtype.itemsize)[: n_elems * dtype.itemsize].view(dtype)


class Staging:
    """Of one key. value: on the GPU. on_host: where its path takes memory. segments: the copies of a round under way.

    hosts: memory that the ranks of the host share, where the path adds there; None: it sends messages. value: where the
    key's value is; None: in new memory.
    """

    def __init__(
        self, space: DeviceSpace, info: KeyInfo, hosts: HostKeys | None, value: SpaceArray | None = None
    ) -> None:
        self._space, self._hosts = space, hosts
        self._n_elems, self._dtype = info.n_elems, sum_dtype(info.dtype)
        self.value = space.empty(info.n_elems, info.dtype) if value is None else value
        self.on_host = PinnedSpace(space.pinned)
        self.segments = Segments(space, info.n_elems * self._dtype.itemsize)
        self._sent: HostArray | None = None

    @property
    def _values(self) -> HostArray:
        """(n,), in the dtype of the sums: where this worker's values are for the path. Kept from the first round on."""
        if self._sent is None:
            n_bytes = self._n_elems * self._dtype.itemsize
            hosts = self._hosts
            memory = self._space.pinned.take(n_bytes) if hosts is None else hosts.room(n_bytes, pages=True)
            self._sent = memory[:n_bytes].view(self._dtype)
        return self._sent

    def _locked(self, array: HostArray) -> HostArray:
        """Memory of the path, ready to be copied from and to."""
        return array if self._hosts is None else self._space.pinned.lock(array)

    @property
    def held_bytes(self) -> int:
        """The value on the device, and where this worker's values are for the path."""
        return int(self.value.nbytes) + (0 if self._sent is None else self._sent.nbytes)

    def share(self, on_host: HostArray, steps: Steps[None], *, is_first: bool) -> Steps[None]:
        """From the device of worker 0 to those of all. steps: of the path, which bring its value on the host to all.

        is_first: this is worker 0.
        """
        on_host = self._locked(on_host)
        if is_first:
            self._space.download(on_host, self.value)
            yield self._space.stream_event()
        yield from steps
        if not is_first:
            self._space.upload(self.value, on_host)

    def first_half(self, values: SpaceArray, updates: Span) -> AbstractContextManager[HostArray]:
        """While the path adds: `values` come to where it reads them, and the sum of `updates` comes into `values`."""
        sent, own = self._locked(self._values), slice(*updates)
        return self.segments.between(values, sent, values, lambda totals: self._locked(totals[own]))

    def second_half(self, on_host: HostArray) -> AbstractContextManager[HostArray]:
        """While the path completes the value `on_host`: the owned part goes down, the others' come up."""
        return self.segments.between(self.value, self._locked(on_host), self.value, self._locked)
