"""The path "divided": the workers of each host add in memory, and servers own the elements from a key's cut on.

Value: in the shared memory of each host, once for each. The elements before the cut take the path "hosted". Of the
others each worker of a host adds some, over all of them in the order of their ranks; the first one pushes the sum, and
receives the new values into the shared memory. Both parts are under way at the same time. So each byte crosses a host's
link once, whatever the number of its workers. What is sent: the messages of "hosted", and those of one client of
the servers for each host.

Labels: workers of a host compare theirs in memory, and servers compare those of the hosts' first workers. Where they
differ within a host, its first worker does not push, but lets a server refuse the round, as it does by itself where
hosts differ. All workers are told then, and find out together who has pushed what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives import one_host
from mpikv.collectives.host_key import GATHERED
from mpikv.engine.operation import Operation, Predicate, Steps
from mpikv.placement.keys import KeyInfo, even_bounds
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.hosted_path import HostedPath
from mpikv.strategies.key_path import PathResources, SharedPath
from mpikv.strategies.speaker import Pushed


class DividedPath(SharedPath):
    """See `KeyPath`. place: where the value, the counters of the workers' part, and those of the servers' part are."""

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(resources, info, placement, (place[0], place[2]))
        assert resources.speaker is not None
        self._resources, self._speaker, self._of_workers = resources, resources.speaker, place[:2]
        self._ring: HostedPath | None = None
        self._exchange: Operation | None = None
        self.reshard(placement)

    @property
    def _bounds(self) -> list[int]:
        """Of the workers of this host, of which the first one has what servers own."""
        n_elems = self._info.n_elems
        return [self.placement.bounds[-1]] + [n_elems] * self._hosts.size

    @property
    def servers(self) -> tuple[str, ...]:
        """See `KeyPath`."""
        return self._speaker.owners_of(self._info)

    def reshard(self, placement: Placement) -> None:
        """See `KeyPath`. The cut may move to the first element, no other one."""
        super().reshard(placement)
        if not (cut := placement.bounds[-1]):
            self._ring = None
        elif self._ring is None:
            info = self._info._replace(shape=(cut,))
            self._ring = HostedPath(self._resources, info, placement, self._of_workers)
        else:
            self._ring.reshard(placement)

    @property
    def held_bytes(self) -> int:
        """The buffers that this worker copies its values to, so that the others can add them."""
        return super().held_bytes + (0 if self._ring is None else self._ring.held_bytes)

    def broadcast(self) -> Steps[None]:
        """Broadcast the whole value by messages along a tree of one rank of each host."""
        whole = HostedPath(self._resources, self._info, self.placement, self._of_workers)
        return whole.broadcast()

    def begin(self, round_: Pushed) -> None:
        """See `KeyPath`."""
        self._round = round_
        self._speaker.begin(self._info)

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Start what servers have of the key, and do the workers' part."""
        self._exchange = self._speaker.apart(self._of_servers(values, combine, comparison), f"key {self._info.key!r}")
        if (ring := self._ring) is None:
            return None
        cut = self.placement.bounds[-1]
        return (yield from ring.reduce_scatter(values[:cut], combine, comparison, changeable=changeable))

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Complete the workers' part, then copy what has come from the servers to `outs`."""
        assert self._exchange is not None
        assert comparison is not None
        cut = self.placement.bounds[-1]
        if (ring := self._ring) is not None:
            yield from ring.allgather([out[:cut] for out in outs], comparison)
        if not comparison.differ:
            yield self._speaker.or_refused(self._info, self._exchange)
        if not comparison.differ and self._hosts.rank:
            yield self._speaker.or_refused(self._info, self._key.awaited([0], GATHERED, 1))
        comparison.differ |= self._speaker.is_refused(self._info)
        if not comparison.differ:
            yield from one_host.allgather(self._hosts.rank, self._bounds, self._key, outs)
            return
        for out in outs:  # the old value
            out[cut:] = self.value[cut:]

    def _of_servers(self, values: HostArray, combine: np.ufunc, comparison: Comparison | None) -> Steps[None]:
        """Add over this host; its first worker asks the servers with the sum."""
        rank, key, info = self._hosts.rank, self._key, self._info
        cut = self.placement.bounds[-1]
        shards = [cut + bound for bound in even_bounds(info.n_elems - cut, self._hosts.size)]
        total = yield from one_host.reduce_scatter(
            rank, values, shards, key, combine=combine, comparison=comparison, to_first=True
        )
        if rank:
            return
        assert comparison is not None
        if not comparison.differ:
            yield from self._speaker.exchange_sum(info, total, self.value, self._round)
        elif not cut:  # else the messages of the workers' part tell all of them
            self._speaker.refuse(info)
            yield Predicate(lambda: False)  # until all are told
