"""The codec of one key, and its state from one round to the next, on whichever path each round is done."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from mpikv.codecs import compression
from mpikv.codecs.base import Codec, State
from mpikv.codecs.identity import IDENTITY
from mpikv.collectives.stages import Span
from mpikv.placement.keys import KeyInfo
from mpikv.placement.placement import Placement
from mpikv.spaces.base import Space, SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.device_pieces import DevicePieces
from mpikv.strategies.pieces import Pieces
from mpikv.transports.base import Group


class KeyCodec:
    """pushed, returned: encode values that are sent to the owners, and back from them.

    uncompressed_pieces: used instead in rounds that are `uncompressed`. exact: this worker's shard before it was sent
    back encoded, for its next update; None: the value itself is exact.
    """

    def __init__(self, info: KeyInfo, space: Space, group: Group) -> None:
        codecs, recorder = compression.of_text(info.codec), group.transport.recorder

        def pieces(codec: Codec) -> Pieces:
            if isinstance(space, DeviceSpace):
                return DevicePieces(info, codec, space, recorder)
            return Pieces(info, codec, recorder)

        self.pushed, self.returned = pieces(codecs.push), pieces(codecs.pull)
        self.uncompressed_pieces = pieces(IDENTITY)
        self.returns_encoded = codecs.pull != IDENTITY
        self._n_elems, self.uncompressed = info.n_elems, False
        self.exact: SpaceArray | None = None

    @property
    def held_bytes(self) -> int:
        exact = 0 if self.exact is None else int(self.exact.nbytes)
        return self.pushed.held_bytes + self.returned.held_bytes + exact

    def reshard(self, before: Placement, placement: Placement) -> None:
        if before.bounds != placement.bounds:
            self.exact = None
            self.returned.states = {}  # other workers own those elements now
        self.set_states(self.pushed.states, placement)

    def set_states(self, states: Mapping[Span, State], placement: Placement) -> None:
        """Replace the states of the codec of this worker's pushes. states: by pieces, which may have other bounds."""
        gathers = placement.algorithm == "gather"  # also if the last round was uncompressed and had owners
        spans = [(0, self._n_elems)] if gathers else pairwise(placement.bounds)
        self.pushed.recut(states, [piece for span in spans for piece in self.pushed.of(span)])

    # --- a round

    def restore_exact(self, value: SpaceArray, updates: Span) -> None:
        """Copy the exact values of the elements `updates` into `value`, before they are updated."""
        if self.exact is not None:
            value[slice(*updates)] = self.exact
