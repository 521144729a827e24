"""What the paths of keys have in common.

A path does the rounds of one key. A round has two halves, and the optimizer runs between them (round_steps.py):

- `begin`: this worker's last contribution to the round is there. The values of all workers are added, so that each
  owner has the sum of its part of the key.
- `end`: the owners have updated their parts of the value. The new value is brought to all workers.

Each path has a file of its own, which says where the value's home is, who adds, in which order, and what is sent. A
path knows no other path: which one a round goes, the key's `KeyPaths` say (paths.py). What paths share are the
collectives, the pieces of a codec (pieces.py, key_codec.py), and the copies between a GPU and the host (staging.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.codecs.choice import Choices
from mpikv.collectives.host_key import HostKey
from mpikv.collectives.labelled import AllgatherGroup, ReduceScatterGroup
from mpikv.collectives.nccl import NcclComm
from mpikv.collectives.pipeline import NO_PIPELINE, Pipeline
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import Spaces
from mpikv.strategies.communicators import Communicators
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.key_codec import KeyCodec
from mpikv.strategies.staging import Staging
from mpikv.transports import wire
from mpikv.transports.base import Group


class Means(NamedTuple):
    """What the paths of one worker's keys are made with.

    spaces: where values are, by their keys, unless they are in memory that the ranks of a host share. plain_group: the
    same ranks for messages of device memory; None: `group` is. hosts: the keys in shared memory, communicators: those
    of MPI's own collectives, nccl: the communicator of NCCL; None where the store has no path that needs them.
    timeout_s: the longest time that a round by NCCL may take on the GPU. choices: for keys that travel encoded or as
    they are, whichever is faster; None: they always travel encoded.
    """

    group: Group
    spaces: Spaces
    hosts: HostKeys | None = None
    communicators: Communicators | None = None
    nccl: NcclComm | None = None
    timeout_s: float = 60.0
    plain_group: Group | None = None
    choices: Choices | None = None


class KeyPath:
    """The path of one key.

    value: what `end` completes, (n,). It is the key's home but where `staging` has that, or where the key has another
    path as well (paths.py). dtype: of what is pushed. shared: whether `value` is in memory that the ranks of this host
    share. Then they read what is pushed where it is, and `end` writes the value to the caller's arrays as it comes.
    changes: whether `begin` may change what is pushed. codec: of what travels; None: values travel as they are.
    staging: the copies of a key in device memory whose path adds in host memory; None: values are added where they are.
    """

    shared = False
    changes = True
    value: SpaceArray
    codec: KeyCodec | None = None

    def __init__(
        self, means: Means, info: KeyInfo, placement: Placement, place: Any, staging: Staging | None = None
    ) -> None:
        """place: the key's in the memory of its host; None: it has none."""
        self.placement, self.staging = placement, staging
        self.dtype: np.dtype[Any] = sum_dtype(info.dtype)
        self._group, self._key_id = means.group, info.id
        self._space = means.spaces.of(info) if staging is None else staging.on_host
        self._parts: Pipeline = NO_PIPELINE if staging is None else staging.segments
        self._labelled: tuple[Group, Group] | None = None

    @property
    def held_bytes(self) -> int:
        """Memory of this worker's own that is held for the value, or for what it adds; by default the value's."""
        return int(self.value.nbytes)

    @property
    def owned(self) -> Span:
        """The elements that this worker owns."""
        begin, end = self.placement.bounds[self._group.rank : self._group.rank + 2]
        return begin, end

    @property
    def updates(self) -> Span:
        """The elements that this worker updates in a round, between its two halves; by default those that it owns."""
        return self.owned

    def cut(self, placement: Placement) -> None:
        """From the next round on the owners own other parts, and labels are compared anew. Not during a round."""
        self.placement, self._labelled = placement, None

    def share(self) -> Steps[None]:
        """Bring `value` of worker 0 to all. Collective; once, before the first round."""
        raise NotImplementedError

    def share_now(self) -> bool:
        """Do what `share` does, where nothing has to be waited for. False: nothing was done."""
        return False

    def begin(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Combine `values` of all workers. Returns (n,) with the result in what it `updates`; None: it is in `values`.

        values: (n,), in `dtype`; not to be changed by the caller until `end` of the same round has ended, and by the
        path only where it `changes` them and they are `changeable`. comparison: of the labels that they were pushed
        under, the same one until `cut`; None: there are none to be compared. Collective.
        """
        raise NotImplementedError

    def end(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Complete `value`, of which each worker has updated its own part, on all workers. Collective.

        outs: arrays of the caller's, (n,), to write it to; there are none where it is not `shared`.
        """
        raise NotImplementedError

    def _others(self) -> list[Span]:
        """What the others own, before this worker's part and behind it."""
        begin, end = self.owned
        return [(0, begin), (end, self.placement.bounds[-1])]

    def _tag(self, use: int) -> int:
        return wire.key_tag(self._key_id, use)

    def _groups(self, comparison: Comparison | None) -> tuple[Group, Group]:
        """For the messages of the two halves, which carry labels. Made by the first round, which may come late."""
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
    """A path whose value is in memory that the ranks of this host share. place: where all ranks know it to be."""

    shared = True
    changes = False

    def __init__(
        self, means: Means, info: KeyInfo, placement: Placement, place: Any, staging: Staging | None = None
    ) -> None:
        super().__init__(means, info, placement, place, staging)
        assert means.hosts is not None
        self._hosts, self._info, self._place = means.hosts, info, place
        self._shared_key: HostKey | None = None
        self.value: HostArray = means.hosts.value(place, info.n_elems, info.dtype)

    @property
    def _key(self) -> HostKey:
        """What its rounds need. Made by the first one, which may come late."""
        if self._shared_key is None:
            info, pages = self._info, self.staging is not None
            self._shared_key = self._hosts.key(self._place, info.n_elems, info.dtype, pages=pages)
        return self._shared_key

    @property
    def held_bytes(self) -> int:
        """Where it copies its values to, for the others to add."""
        return 0 if self._shared_key is None else self._shared_key.held_bytes


# Where a path has nothing to add to a collective, it returns the generator: one more in the chain would be one more
# frame between every message and its call.
