"""The way of a key in device memory over one of the host's ways, which values are copied to and from.

A round copies this worker's values down, into host memory that the way on the host adds from where it is: memory that
the ranks of the host share, or, for messages, page-locked memory that is kept with the key. The sum of the owned part
comes up to the device, where the optimizer runs; the updated part goes down; and what the others own of the new value
comes up. So the bits are those of the way on the host. Casts to the dtype of the sums are made on the device, before.

A long value does this segment by segment (segments.py): what the way on the host needs first goes down first and is
sent, or counted as readable, as soon as it is there, while the next segments are on their way; what is complete comes
up while others still go down. The algorithms `ring` and those through memory work so. The others, which are for short
values or for hosts whose ranks share no memory, begin when all is down.

Order. Copies down are in the store's stream, copies up of long values in a second one. At the end of each half of a
round the store's stream waits for what was begun in the second one. So the first copy down of a round is behind all
that the round before has begun, and no other rank learns of a round before this one has seen that copy done. Memory of
the host that the round before reads or writes is free by then. Nothing waits but by yielded requests.

Cost of a round, n elements of which this worker owns k: n and k down, k and n - k up, beside the cost of the way on the
host. Page-locked: the value and two arrays of n, or fewer where workers share memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.collectives.stages import Span
from mpikv.engine.request import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.members import Path
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.host import HostSpace
from mpikv.spaces.named import HOST, Spaces
from mpikv.spaces.pinned import Pinned
from mpikv.strategies.encoded import Encoded
from mpikv.strategies.segments import Segments
from mpikv.strategies.ways import WAYS, Make, Means, Way

HOST_WAYS: Mapping[Path, Make] = {**WAYS, "encoded": Encoded}


class PinnedSpace(HostSpace):
    """Host memory whose arrays are page-locked."""

    def __init__(self, pinned: Pinned) -> None:
        super().__init__()
        self._pinned = pinned

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """See `Space`."""
        return self._pinned.take(n_elems * dtype.itemsize)[: n_elems * dtype.itemsize].view(dtype)


class Staged:
    """See `Way`. place: the key's, of the way on the host."""

    shared = False
    changes = True

    def __init__(self, means: Means, info: KeyInfo, placement: Placement, place: Any) -> None:
        space = means.spaces.of(info)
        assert isinstance(space, DeviceSpace)
        self._space, self._hosts, self._rank = space, means.hosts, means.group.rank
        self._n_elems, self.dtype = info.n_elems, sum_dtype(info.dtype)
        self.placement = placement
        self.value = space.empty(info.n_elems, info.dtype)
        assert placement.host is not None
        on_host = placement._replace(path=placement.host, host=None)
        self._segments = Segments(space, info.n_elems * self.dtype.itemsize)
        means = means._replace(spaces=Spaces(PinnedSpace(space.pinned)), pages=True, parts=self._segments)
        self._inner = HOST_WAYS[on_host.path](means, info._replace(space=HOST), on_host, place)
        self._sent: HostArray | None = None

    @property
    def _values(self) -> HostArray:
        """(n,), in the dtype of the sums: where this worker's values are for the way on the host. Kept from the first
        round on.
        """
        if self._sent is None:
            n_bytes = self._n_elems * self.dtype.itemsize
            if self._inner.shared:
                assert self._hosts is not None
                memory = self._hosts.room(n_bytes, pages=True)
            else:
                memory = self._space.pinned.take(n_bytes)
            self._sent = memory[:n_bytes].view(self.dtype)
        return self._sent

    def _locked(self, array: HostArray) -> HostArray:
        """Memory of the way on the host, ready to be copied from and to."""
        return self._space.pinned.lock(array) if self._inner.shared else array

    def begin(self, *, plain: bool) -> None:
        """So does the way on the host."""
        self._inner.begin(plain=plain)

    @property
    def on_host(self) -> Way:
        """The way of its values on the host."""
        return self._inner

    @property
    def updates(self) -> Span:
        """What the way on the host does."""
        return self._inner.updates

    def _own(self) -> slice:
        return slice(*self.updates)

    @property
    def held_bytes(self) -> int:
        """The value, on the device and on the host, and what the way on the host adds."""
        sent = 0 if self._sent is None else self._sent.nbytes
        return int(self.value.nbytes) + sent + self._inner.held_bytes

    def cut(self, placement: Placement) -> None:
        """From the next round on the owners own other parts."""
        self.placement = placement
        self._inner.cut(placement._replace(path=self._inner.placement.path, host=None))

    def share(self) -> Steps[None]:
        """As the way on the host does, from the device of worker 0 to those of all."""
        on_host = self._locked(self._inner.value)
        if self._rank == 0:
            self._space.fetch(on_host, self.value)
            yield self._space.begun()
        yield from self._inner.share()
        if self._rank != 0:
            self._space.bring(self.value, on_host)

    def share_now(self) -> bool:
        """The value has to be copied first."""
        return False

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[None]:
        """The sum of the owned part comes into `values`."""
        sent, own = self._locked(self._values), self._own()
        with self._segments.between(values, sent, values, lambda totals: self._locked(totals[own])):
            yield from self._inner.reduce_scatter(sent, combine, comparison, changeable=True)

    def allgather(self, outs: Sequence[HostArray], comparison: Comparison | None) -> Steps[None]:
        """The owned part goes down, the others' come up."""
        with self._segments.between(self.value, self._locked(self._inner.value), self.value, self._locked):
            yield from self._inner.allgather((), comparison)
