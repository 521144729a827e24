"""What encodes the values of one key, and what follows from one of its rounds to the next, whichever path each goes.

Values that are compressed, and not by force, travel as they are in rounds where that is faster (codecs/choice). The
first of such rounds adds what the codec owes. Where owners send new values back encoded, they keep the exact values of
what they own for their next update.
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
    """Of one key. pushed, returned, as_it_is: what travels to the owners, back from them, and where nothing is encoded.

    choice: whether values travel encoded; None: they always do. plain, measured: of the round that has begun, whether
    it travels as it is, and whether the choice says so. exact: what this worker owns of the value, as it was before it
    was sent back encoded; None: it is in the value.
    """

    def __init__(self, info: KeyInfo, space: Space, group: Group, choices: Choices | None) -> None:
        travels = compression.of_text(info.codec)

        def pieces(codec: Codec) -> Pieces:
            return DevicePieces(info, codec, space) if isinstance(space, DeviceSpace) else Pieces(info, codec)

        self.pushed, self.returned, self.as_it_is = pieces(travels.push), pieces(travels.pull), pieces(IDENTITY)
        self.returns_encoded = travels.pull != IDENTITY
        self._group, self._n_elems, self._name = group, info.n_elems, travels.push.name
        self._clock = group.transport.clock
        self._choices = choices if travels.chosen and info.n_elems > 0 and group.size > 1 else None
        self.choice = self._new_choice()
        self.plain = self.measured = False
        self.exact: SpaceArray | None = None

    def _new_choice(self) -> CodecChoice | None:
        return None if self._choices is None else self._choices.of(self._name)

    @property
    def held_bytes(self) -> int:
        """What the codecs remember, and exact values."""
        exact = 0 if self.exact is None else int(self.exact.nbytes)
        return self.pushed.held_bytes + self.returned.held_bytes + exact

    def cut(self, before: Placement, placement: Placement) -> None:
        """From the next round on the owners own other parts, or there are owners at last."""
        if before.bounds != placement.bounds:
            self.exact = None
            self.returned.states = {}  # of parts that are others' now
        self.choice = self._new_choice()  # other messages take another time
        self.remember(self.pushed.states, placement)

    def remember(self, states: Mapping[Span, State], placement: Placement) -> None:
        """Of what this worker pushes, in place of what its codec remembers. states: of these pieces or others."""
        gathers = placement.algorithm == "gather"  # whatever the last round was
        whole = [(0, self._n_elems)] if gathers else pairwise(placement.bounds)
        self.pushed.recut(states, [piece for span in whole for piece in self.pushed.of(span)])

    # --- a round

    def begin(self, *, plain: bool) -> None:
        """A round begins; a `plain` one travels as it is, others as the choice says."""
        choice = None if plain else self.choice
        self.measured = choice is not None
        self.plain = plain or (choice is not None and choice.plain)
        if choice is not None:
            choice.begin(self._clock.now_s())

    def with_owed(self, values: SpaceArray) -> SpaceArray:
        """The values of a round that travel as they are, with what earlier ones owe if the choice says so."""
        return self.pushed.with_owed(values) if self.measured else values

    def restore(self, value: SpaceArray, updates: Span) -> None:
        """Bring the exact values to where they are updated."""
        if self.exact is not None:
            value[slice(*updates)] = self.exact

    def end(self, tag: int) -> Steps[None]:
        """A round that was measured has ended: all workers compare their times after the same one, in messages."""
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
