"""What the ways of keys (ways.py) have in common, and what those have whose values are on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.collectives.stages import Span
from mpikv.placement.keys import KeyInfo
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.transports import wire

if TYPE_CHECKING:
    from mpikv.strategies.ways import Means


class KeyWay:
    """Of one key. See `Way`."""

    shared = False

    def __init__(self, means: Means, info: KeyInfo, placement: Placement) -> None:
        self.placement = placement
        self.dtype: np.dtype[Any] = sum_dtype(info.dtype)
        self._group, self._key_id = means.group, info.id

    def cut(self, placement: Placement) -> None:
        """From the next round on the owners own other parts."""
        self.placement = placement

    def begin(self, *, plain: bool) -> None:
        """All values travel as they are."""

    @property
    def changes(self) -> bool:
        """It adds where the values of this worker are."""
        return True

    @property
    def updates(self) -> Span:
        """The elements that this worker updates: those that it owns."""
        begin, end = self.placement.bounds[self._group.rank : self._group.rank + 2]
        return begin, end

    def share_now(self) -> bool:
        """By messages it takes time."""
        return False

    def _tag(self, use: int) -> int:
        return wire.key_tag(self._key_id, use)


class DeviceWay(KeyWay):
    """Of a key whose arrays are those of a `DeviceSpace`."""

    def __init__(self, means: Means, info: KeyInfo, placement: Placement) -> None:
        super().__init__(means, info, placement)
        space: Any = means.spaces.of(info)
        assert isinstance(space, DeviceSpace)
        self._space = space
        self.value: SpaceArray = space.empty(info.n_elems, info.dtype)

    @property
    def held_bytes(self) -> int:
        """The value, on the GPU."""
        return int(self.value.nbytes)
