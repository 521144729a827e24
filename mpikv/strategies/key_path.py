"""What the paths of keys have in common.

A path does the rounds of one key. A round has two halves, and the optimizer runs between them (round_steps.py):

- `reduce_scatter` adds the values of all workers, so that each owner has the sum of its shard of the key.
- `allgather` sends the new values, of which each owner has updated its shard, to all workers.

Each path has a file of its own, which says where the value is kept, who adds, in which order, and what is sent. A path
knows no other path: the key's `KeyPaths` choose the path of a round (paths.py). Paths share the collectives, the pieces
of a codec (pieces.py, key_codec.py), and the copies between a GPU and the host (host_copies.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.collectives.host_key import HostKey
from mpikv.collectives.labelled import AllgatherGroup, ReduceScatterGroup
from mpikv.collectives.nccl import NcclComm
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import Spaces
from mpikv.strategies.communicators import Communicators
from mpikv.strategies.host_copies import HostCopies
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.key_codec import KeyCodec
from mpikv.strategies.speaker import Pushed, Speaker
from mpikv.transports import wire
from mpikv.transports.base import Group


class PathResources(NamedTuple):
    """What the paths of one worker's keys need.

    group: sends and receives messages. device_group: does so from and to device memory, without their ordering by
    priority; None: use `group`. speaker: of stores whose servers own parts of keys. spaces: the memory spaces of keys
    whose values are not in shared memory. hosts: the keys in shared memory; communicators: those for MPI's own
    collectives; nccl: the communicator of NCCL; each None where the store has no path that needs it. timeout_s: the
    longest time that a round by NCCL may take on the GPU.
    """

    group: Group
    spaces: Spaces
    hosts: HostKeys | None = None
    communicators: Communicators | None = None
    nccl: NcclComm | None = None
    timeout_s: float = 60.0
    device_group: Group | None = None
    speaker: Speaker | None = None


class KeyPath:
    """The path of one key.

    value: the array that `allgather` completes, (n,). It holds the key's value, unless `copies` or an earlier path of
    the key does (paths.py). dtype: the dtype of pushed values. shared: whether `value` is in memory that the ranks of
    this host share. If so, they read pushed values in place, and `allgather` writes each segment of the value to the
    caller's arrays as soon as it is complete. overwrites: whether `reduce_scatter` may overwrite pushed values.
    sends_back: whether `allgather` sends anything. codec: encodes what is sent; None: values are sent uncompressed.
    copies: of a key in device memory whose path adds in host memory, set by paths.py; None: values are added where they
    are.
    """

    shared = False
    overwrites = True
    sends_back = True
    value: SpaceArray
    codec: KeyCodec | None = None
    copies: HostCopies | None = None

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        """place: the key's place in the shared memory of its host; None: it has none."""
        self.placement = placement
        self.dtype: np.dtype[Any] = sum_dtype(info.dtype)
        self._group, self._key_id = resources.group, info.id
        self._space = resources.spaces.host if placement.path == "host" else resources.spaces.of(info)
        self._labelled: tuple[Group, Group] | None = None

    @property
    def held_bytes(self) -> int:
        """This worker's own memory that the path holds beside the key's value."""
        return 0 if self.copies is None else self.copies.held_bytes

    @property
    def owned(self) -> Span:
        """The shard that this worker owns."""
        begin, end = self.placement.bounds[self._group.rank : self._group.rank + 2]
        return begin, end

    @property
    def updates(self) -> Span:
        """The elements that this worker updates in a round, between its two halves; by default those that it owns."""
        return self.owned

    @property
    def servers(self) -> tuple[str, ...]:
        """The names of the servers that own a part of the key; by default there are none."""
        return ()

    def reshard(self, placement: Placement) -> None:
        """Change the bounds of the owners' shards, and compare labels anew. Not to be called during a round."""
        self.placement, self._labelled = placement, None

    def begin(self, round_: Pushed) -> None:
        """Begin a round. Local."""

    def broadcast(self) -> Steps[None]:
        """Broadcast `value` of worker 0. Collective; once, before the first round."""
        raise NotImplementedError

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
        return wire.key_tag(self._key_id, use)

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


class SharedPath(KeyPath):
    """A path whose value is in memory that the ranks of this host share, at the key's `place`."""

    shared = True
    overwrites = False

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(resources, info, placement, place)
        assert resources.hosts is not None
        self._hosts, self._info, self._place = resources.hosts, info, place
        self._shared_key: HostKey | None = None
        self.value: HostArray = resources.hosts.value(place, info.n_elems, info.dtype)

    @property
    def _key(self) -> HostKey:
        """The key's counters and buffers. Made by the first round: some keys have none."""
        if self._shared_key is None:
            self._shared_key = self._hosts.key(self._place, self._info.n_elems, self._info.dtype)
        return self._shared_key

    @property
    def held_bytes(self) -> int:
        """The buffer that this worker copies its values to, so that the others can add them."""
        return super().held_bytes + (0 if self._shared_key is None else self._shared_key.held_bytes)


# Where a path does no more than a collective, it returns the collective's generator: a generator of its own around it
# would be one more frame between every message and the call.
