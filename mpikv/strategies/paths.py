"""The paths of rounds, by name, and the choice of a path for each round of a key.

A key gets a second path with the first round whose reduction needs whole values. The value is in the memory of the
key's usual path, or on the GPU if that path copies it to the host; the second one completes it in the same array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Path
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import DEVICE
from mpikv.strategies.divided_path import DividedPath
from mpikv.strategies.host_copies import HostCopies
from mpikv.strategies.hosted_path import HostedPath, OneHostPath
from mpikv.strategies.key_path import KeyPath, PathResources
from mpikv.strategies.message_path import NativePath, RingPath, WholePath
from mpikv.strategies.mpi_path import MpiPath
from mpikv.strategies.nccl_path import NcclPath

if TYPE_CHECKING:
    from mpikv.strategies.queues import Round

PATHS: Mapping[Path, type[KeyPath]] = {
    "direct": OneHostPath,
    "hosted": HostedPath,
    "divided": DividedPath,
    "ring": RingPath,
    "native": NativePath,
    "mpi": MpiPath,
    "nccl": NcclPath,
}


class KeyPaths:
    """The paths of one key. place: the key's place in shared memory.

    value: the key's value, (n,). dtype: in which paths take pushed values. usual: the path of most rounds. whole: of
    rounds whose reduction needs whole values; None: there was none.
    """

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        self.placement, self._is_first = placement, resources.group.rank == 0
        self._resources, self._info = resources, info
        self.usual = _path_of(resources, info, placement, place)
        copies = self.usual.copies
        self.value: SpaceArray = self.usual.value if copies is None else copies.value
        self.dtype: np.dtype[Any] = self.usual.dtype
        self.whole: WholePath | None = None

    @property
    def shared(self) -> bool:
        """Whether the value is kept in memory that the ranks of a host share."""
        return self.usual.shared

    @property
    def value_is_shared(self) -> bool:
        """Whether a round writes each segment of the value to the caller's arrays as soon as it is complete."""
        return self.usual.shared and self.usual.copies is None

    @property
    def held_bytes(self) -> int:
        holders = (self.usual, self.whole)
        held = sum(one.held_bytes for one in holders if one is not None)
        return held + (0 if self.value_is_shared else int(self.value.nbytes))

    def reshard(self, placement: Placement) -> None:
        self.usual.reshard(placement)
        self.placement = placement

    # --- the first value

    def broadcast(self) -> Steps[None]:
        path = self.usual
        return path.broadcast() if path.copies is None else path.copies.broadcast(path, is_first=self._is_first)

    def broadcast_now(self) -> bool:
        return self.usual.copies is None and self.usual.broadcast_now()

    # --- rounds

    def begin_round(self, round_: Round) -> KeyPath:
        """Begin a round, and return its path."""
        path = self.usual
        if round_.op.whole:
            if self.whole is None:
                self.whole = _whole_path_of(self._resources, self._info, self.placement, self.value)
            path = self.whole
        path.begin(round_)
        return path


def _path_of(resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> KeyPath:
    if placement.path != "host":
        return PATHS[placement.path](resources, info, placement, place)
    assert placement.host is not None
    path = PATHS[placement.host](resources, info, placement, place)
    _copy_through_host(path, resources, info, None)
    return path


def _whole_path_of(resources: PathResources, info: KeyInfo, placement: Placement, value: SpaceArray) -> WholePath:
    path = WholePath(resources, info, placement, None)
    path.value = value
    if info.space == DEVICE:
        _copy_through_host(path, resources, info, value)
    return path


def _copy_through_host(path: KeyPath, resources: PathResources, info: KeyInfo, value: SpaceArray | None) -> None:
    """Let a path on the host work for a key on a GPU."""
    path.copies = HostCopies(cast(DeviceSpace, resources.spaces.of(info)), info, value)
    path.overwrites = False  # of the pushed values only the copies
    if not path.shared:
        path.value = path.copies.on_host()
