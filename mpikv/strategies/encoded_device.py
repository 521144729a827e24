"""The way of keys in device memory whose values travel encoded, by codecs that a GPU can do.

As on the host (encoded.py), by the same messages; but pieces are encoded, decoded and added on the GPU
(device_pieces.py), and the optimizer runs there. So n bytes of values do not cross to the host, only what travels of
them. Rounds as they are go the way of a key on a GPU without compression.

Cost: that on the host, with a GPU's speed; down what is sent, up what is received. Memory beside it, on the GPU: the
sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mpikv.codecs.base import Codec
from mpikv.collectives.broadcast import broadcast
from mpikv.engine.request import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Path
from mpikv.placement.placement import Placement
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.device_pieces import DevicePieces
from mpikv.strategies.encoded import Encoded
from mpikv.strategies.pieces import Pieces
from mpikv.strategies.staged import Staged
from mpikv.strategies.ways import WAYS, Make, Means


class EncodedOnDevice(Encoded):
    """See `Way`."""

    changes = True
    _ways: Mapping[Path, Make] = {**WAYS, "staged": Staged}
    _receives_in_place = False

    def _pieces(self, info: KeyInfo, codec: Codec) -> Pieces:
        return DevicePieces(info, codec, cast(DeviceSpace, self._space))

    def share(self) -> Steps[None]:
        """By a tree, through page-locked memory."""
        space: Any = self._space
        values = space.pinned.take(self.value.nbytes).view(self.value.dtype)
        if self._group.rank == 0:
            space.fetch(values, self.value)
            yield space.begun()
        yield from broadcast(self._group, values, 0, self._tag(0))
        if self._group.rank != 0:
            space.bring(self.value, values)
            yield space.begun()  # `values` is in use until then


def encoded(means: Means, info: KeyInfo, placement: Placement, place: Any) -> Encoded:
    """The way of a key that travels encoded, by where it is."""
    on_device = isinstance(means.spaces.of(info), DeviceSpace)
    return (EncodedOnDevice if on_device else Encoded)(means, info, placement, place)
