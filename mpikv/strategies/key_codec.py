"""The codec of one key, and its state from one round to the next, on whichever path each round is done.

Unless its codec is forced, a key's values are sent uncompressed in rounds where that is faster (codecs/choice). The
first of such rounds adds the codec's residual. Where owners send new values back encoded, they keep the exact values of
their shards for their next update.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs import compression
from mpikv.codecs.base import Codec, State
from mpikv.codecs.choice import Choices, CodecChoice
from mpikv.codecs.identity import IDENTITY
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.placement import Placement
from mpikv.spaces.base import Space, SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.device_pieces import DevicePieces
from mpikv.strategies.pieces import Pieces
from mpikv.transports.base import Group


class KeyCodec:
    """The codec of one key.

    pushed, returned: encode values that are sent to the owners, and back from them. uncompressed_pieces: used instead
    in uncompressed rounds. choice: whether values are sent encoded; None: they always are. uncompressed: whether the
    current round is. timed: whether the choice decided that and measures the round's time. exact: this worker's shard
    before it was sent back encoded; None: the value itself is exact.
    """

    def __init__(self, info: KeyInfo, space: Space, group: Group, choices: Choices | None) -> None:
        codecs, recorder = compression.of_text(info.codec), group.transport.recorder

        def pieces(codec: Codec) -> Pieces:
            if isinstance(space, DeviceSpace):
                return DevicePieces(info, codec, space, recorder)
            return Pieces(info, codec, recorder)

        self.pushed, self.returned = pieces(codecs.push), pieces(codecs.pull)
        self.uncompressed_pieces = pieces(IDENTITY)
        self.returns_encoded = codecs.pull != IDENTITY
        self._group, self._n_elems, self._name = group, info.n_elems, codecs.push.name
        self._info = info
        self._clock = group.transport.clock
        self._choices = choices if codecs.chosen and info.n_elems > 0 and group.size > 1 else None
        self.choice = self._new_choice()
        self.uncompressed = self.timed = False
        self.exact: SpaceArray | None = None

    def _new_choice(self) -> CodecChoice | None:
        return None if self._choices is None else self._choices.of(self._name, self._info)

    @property
    def held_bytes(self) -> int:
        """Memory of the codecs' states and of exact values."""
        exact = 0 if self.exact is None else int(self.exact.nbytes)
        return self.pushed.held_bytes + self.returned.held_bytes + exact

    def reshard(self, before: Placement, placement: Placement) -> None:
        """Change the bounds of the owners' shards. Not to be called during a round."""
        if before.bounds != placement.bounds:
            self.exact = None
            self.returned.states = {}  # other workers own those elements now
        self.choice = self._new_choice()  # times of earlier rounds do not hold for other messages
        self.set_states(self.pushed.states, placement)

    def set_states(self, states: Mapping[Span, State], placement: Placement) -> None:
        """Replace the states of the codec of this worker's pushes. states: by pieces, which may have other bounds."""
        gathers = placement.algorithm == "gather"  # also if the last round was uncompressed and had owners
        spans = [(0, self._n_elems)] if gathers else pairwise(placement.bounds)
        self.pushed.recut(states, [piece for span in spans for piece in self.pushed.of(span)])

    # --- a round

    def begin_round(self, *, uncompressed: bool) -> None:
        """Begin a round. uncompressed: it must be sent so; else the choice decides."""
        choice = None if uncompressed else self.choice
        self.timed = choice is not None
        self.uncompressed = uncompressed or (choice is not None and choice.uncompressed)
        if choice is not None:
            choice.begin(self._clock.now_s())

    def with_residual(self, values: SpaceArray) -> SpaceArray:
        """The values of an uncompressed round, plus the residual if the choice made the round uncompressed."""
        return self.pushed.with_residual(values) if self.timed else values

    def restore_exact(self, value: SpaceArray, updates: Span) -> None:
        """Copy the exact values of the elements `updates` into `value`, before they are updated."""
        if self.exact is not None:
            value[slice(*updates)] = self.exact

    def end_round(self, tag: int) -> Steps[None]:
        """End a round whose time is measured. After some rounds, the same on all workers, exchange times with all."""
        assert self.choice is not None
        self.choice.end(self._clock.now_s())
        if self.choice.exchange_due:
            group = self._group
            times: list[HostArray] = [self.choice.times for _ in range(group.size)]
            others = [(group.rank + step) % group.size for step in range(1, group.size)]
            receives = [group.irecv(times[rank], rank, tag) for rank in others]
            sends = [group.isend(times[group.rank], rank, tag) for rank in others]
            yield from (*receives, *sends)
            self.choice.agree(times)
