"""What the paths of keys have in common.

A path does the rounds of one key. A round has two halves, and the optimizer runs between them (queues.py):

- `reduce_scatter` adds the values of all workers, so that each owner has the sum of its shard of the key.
- `allgather` sends the new values, of which each owner has updated its shard, to all workers.

Each path says where the value is kept, who adds, in which order, and what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.labelled import AllgatherGroup, ReduceScatterGroup
from mpikv.collectives.nccl import NcclComm
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import Spaces
from mpikv.strategies.host_keys import HostKeys
from mpikv.transports import wire
from mpikv.transports.base import Group

if TYPE_CHECKING:
    from mpikv.strategies.divided_path import Speaker
    from mpikv.strategies.message_path import Communicators
    from mpikv.strategies.queues import Round


class PathResources(NamedTuple):
    """What the paths of one worker's keys need.

    group: sends and receives messages. hosts: the keys in shared memory. communicators: for MPI's own collectives.
    timeout_s: the longest time that a round by NCCL may take on the GPU. speaker: where servers own parts of keys.
    """

    group: Group
    spaces: Spaces
    hosts: HostKeys | None = None
    communicators: Communicators | None = None
    nccl: NcclComm | None = None
    timeout_s: float = 60.0
    speaker: Speaker | None = None


class KeyPath:
    """The path of one key. place: its place in the shared memory of its host; None: it has none.

    dtype: of pushed values. shared: whether `value` is in memory that the ranks of this host share. If so, they read
    pushed values in place, and `allgather` writes each segment of the value to the caller's arrays as soon as it is
    complete. overwrites: whether `reduce_scatter` may overwrite pushed values.
    """

    shared = False
    overwrites = True

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        self.placement, self._resources, self._info, self.place = placement, resources, info, place
        self.dtype: np.dtype[Any] = sum_dtype(info.dtype)
        self._group = resources.group
        self._space = resources.spaces.host if placement.path == "host" else resources.spaces.of(info)
        self._labelled: tuple[Group, Group] | None = None

    @cached_property
    def value(self) -> SpaceArray:
        """(n,), the key's value, which `allgather` completes."""
        return self._space.empty(self._info.n_elems, self._info.dtype)

    @property
    def held_bytes(self) -> int:
        """This worker's own memory that the path holds beside the key's value."""
        return 0

    @property
    def updates(self) -> Span:
        """The elements that this worker updates in a round, between its two halves; by default those that it owns."""
        begin, end = self.placement.bounds[self._group.rank : self._group.rank + 2]
        return begin, end

    @property
    def servers(self) -> tuple[str, ...]:
        """The names of the servers that own a part of the key."""
        return ()

    def reshard(self, placement: Placement) -> None:
        """Change the bounds of the owners' shards, and compare labels anew. Not to be called during a round."""
        self.placement, self._labelled = placement, None

    def begin(self, round_: Round) -> None:
        """Begin a round. Local."""

    def broadcast(self) -> Steps[None]:
        """Broadcast `value` of worker 0, by messages. Collective; once, before the first round."""
        return broadcast(self._group, self.value, 0, self._tag(0))

    def broadcast_now(self) -> bool:
        """Do what `broadcast` does if that needs no wait. Returns whether it was done."""
        return False

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Combine `values` of all workers. Returns (n,), valid in the elements `updates`; None: it is `values`.

        values: (n,), in `dtype`. The caller must not change them until `allgather` of this round has ended; the path
        may overwrite them only if `overwrites` is set and they are `changeable`. comparison: compares the labels that
        workers have pushed under, the same object until `reshard`; None: there is nothing to compare. Collective.
        """
        raise NotImplementedError

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Complete `value`, of which each worker has updated its own shard, on all workers. Collective.

        outs: the caller's arrays, (n,), to write the value to; only given if the path is `shared`.
        """
        raise NotImplementedError

    def _tag(self, use: int) -> int:
        return wire.key_tag(self._info.id, use)

    def _groups(self, comparison: Comparison | None) -> tuple[Group, Group]:
        """The groups of the two halves, whose messages contain labels. Made by the first round: some keys have none."""
        if self._labelled is None:
            group, bounds = self._group, self.placement.bounds
            self._labelled = group, group
            if comparison is not None:
                owners = frozenset(rank for i, rank in enumerate(group.ranks) if bounds[i] < bounds[i + 1])
                self._labelled = (
                    ReduceScatterGroup(group.transport, group.ranks, comparison),
                    AllgatherGroup(group.transport, group.ranks, comparison, owners),
                )
        return self._labelled


# Where a path does no more than a collective, it returns the collective's generator: a generator of its own around it
# would be one more frame between every message and the call.
