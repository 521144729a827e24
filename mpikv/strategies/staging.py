"""The path "staged": copies of a key whose value is on a GPU while another path adds its values in host memory.

Value: each worker has a copy in its device memory, where the optimizer runs. Who adds, in which order, and what is
sent: the placement names a path on the host (`Placement.host`) that decides this, so the bits are those of that path.

A round copies this worker's values down, from the GPU to host memory in which the path can add: memory that the ranks
of the host share, or, for messages, page-locked memory that is kept with the key. The sum of the owned shard is copied
up to the GPU, the updated shard down, and the other workers' shards of the new value up. Values are cast to the dtype
of sums on the GPU, before they are copied.

A long value is copied in segments (collectives/segments.py). Those that the path needs first are copied first, and each
is sent, or counted as readable, as soon as it has been copied, while the next is being copied. Complete segments of the
result are copied up while others are still copied down. The algorithm `ring` and those in shared memory work like this;
the others, for short values or for hosts whose ranks share no memory, begin when all has been copied down.

Order. Copies down use the store's stream, copies up of long values a second one. At the end of each half of a round the
store's stream waits for the second one. So a round's first copy down runs after all copies of the round before, and
this rank signals a round to others only after that copy is done, when the memory that the round before used is free.
The host never blocks: it waits only by yielding requests.

Cost of a round of n elements, of which this worker owns k, beside that of the path: n and k elements copied down, k and
n - k up. Page-locked memory: the value and two arrays of n, or fewer where workers share memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.collectives.segments import CopyPipeline
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
    """The copies of one key.

    hosts: the shared memory in which the path adds; None: it sends messages. value: the key's array on the GPU; None:
    make one. on_host: the space in which the path allocates memory. segments: the copies of the current round.
    """

    def __init__(
        self, space: DeviceSpace, info: KeyInfo, hosts: HostKeys | None, value: SpaceArray | None = None
    ) -> None:
        self._space, self._hosts = space, hosts
        self._n_elems, self._dtype = info.n_elems, sum_dtype(info.dtype)
        self.value = space.empty(info.n_elems, info.dtype) if value is None else value
        self.on_host = PinnedSpace(space.pinned)
        self.segments = CopyPipeline(space, info.n_elems * self._dtype.itemsize)
        self._sent: HostArray | None = None

    @property
    def _values(self) -> HostArray:
        """The host memory for this worker's values: (n,), in the dtype of sums. Made by the first round, then kept."""
        if self._sent is None:
            n_bytes = self._n_elems * self._dtype.itemsize
            hosts = self._hosts
            memory = self._space.pinned.take(n_bytes) if hosts is None else hosts.allocate(n_bytes, pages=True)
            self._sent = memory[:n_bytes].view(self._dtype)
        return self._sent

    def _locked(self, array: HostArray) -> HostArray:
        """Memory of the path, page-locked, so that the GPU can copy from and to it."""
        return array if self._hosts is None else self._space.pinned.lock(array)

    @property
    def held_bytes(self) -> int:
        """The value on the GPU, and the host memory for this worker's values."""
        return int(self.value.nbytes) + (0 if self._sent is None else self._sent.nbytes)

    def broadcast(self, on_host: HostArray, steps: Steps[None], *, is_first: bool) -> Steps[None]:
        """Broadcast the value from the GPU of worker 0 to those of all.

        steps: the path's own broadcast of the value `on_host`. is_first: whether this is worker 0.
        """
        on_host = self._locked(on_host)
        if is_first:
            self._space.download(on_host, self.value)
            yield self._space.stream_event()
        yield from steps
        if not is_first:
            self._space.upload(self.value, on_host)

    def first_half(self, values: SpaceArray, updates: Span) -> AbstractContextManager[HostArray]:
        """While the path adds: copy `values` to the host for it, and the sum of the span `updates` into `values`."""
        sent, own = self._locked(self._values), slice(*updates)
        return self.segments.copying(values, sent, values, lambda totals: self._locked(totals[own]))

    def second_half(self, on_host: HostArray) -> AbstractContextManager[HostArray]:
        """While the path completes the value `on_host`: copy the owned shard down, and the others up."""
        return self.segments.copying(self.value, self._locked(on_host), self.value, self._locked)
