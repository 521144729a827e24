"""The paths "direct" and "hosted": the workers of a host add in memory that they share, where the value is, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives import hosted, one_host
from mpikv.collectives.host_key import GATHERED, HostKey
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.key_path import KeyPath, PathResources


class SharedPath(KeyPath):
    """A path whose value is in memory that the ranks of this host share, at the key's `place`.

    Pushed values are copied only if the others of the host cannot read them in place.
    """

    shared = True
    overwrites = False

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(resources, info, placement, place)
        assert resources.hosts is not None
        self._hosts = resources.hosts
        self._shared_key: HostKey | None = None
        self.value = resources.hosts.value(place, info.n_elems, info.dtype)

    @property
    def _key(self) -> HostKey:
        """The key's counters and buffers. Made when it is needed: some keys have none."""
        if self._shared_key is None:
            self._shared_key = self._hosts.key(self.place, self._info.n_elems, self._info.dtype)
        return self._shared_key

    @property
    def held_bytes(self) -> int:
        """Also the buffer that this worker copies its values to, so that the others can add them."""
        return super().held_bytes + (0 if self._shared_key is None else self._shared_key.held_bytes)


class OneHostPath(SharedPath):
    """The path "direct" for rounds of one key: pushes, and calls that workers make at different times.

    Calls that all make at the same time use direct.py, with the same bits. Each worker adds the shard that it owns,
    directly from the arrays of all workers, in the order of the ranks. Nothing is sent: counters in the shared memory
    show how far each worker has come (collectives/one_host).
    """

    def broadcast(self) -> Steps[None]:
        if not self.broadcast_now():
            yield self._key.awaited([0], GATHERED, 1)

    def broadcast_now(self) -> bool:
        """Publish the value at rank 0; other ranks check whether it is published. Not used for keys on a GPU."""
        if self._group.rank == 0:
            self._hosts.publish(self.place)
        return self._group.rank == 0 or self._hosts.is_published(self.place)

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        rank, bounds = self._group.rank, self.placement.bounds
        return one_host.reduce_scatter(rank, values, bounds, self._key, combine=combine, comparison=comparison)

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        return one_host.allgather(self._group.rank, self.placement.bounds, self._key, outs)


class HostedPath(SharedPath):
    """Several hosts: rings of ranks connect them; each ring has one rank of each host (collectives/hosted).

    On each host the rank of a ring adds the values of the host's workers, in place; then sums are added from host to
    host around the ring, in the order that collectives/host_rings fixes. Sums and results are sent between hosts
    only, with labels.
    """

    def broadcast(self) -> Steps[None]:
        return hosted.share(self._group, self._key, self._tag(0))

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        return hosted.reduce_scatter(
            self._groups(comparison)[0],
            values,
            self.placement.bounds,
            self._tag(1),
            self._key,
            changeable=changeable,
            combine=combine,
            comparison=comparison,
        )

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        group = self._groups(comparison)[1]
        return hosted.allgather(group, self.placement.bounds, self._tag(2), self._key, outs)
