"""A worker's view of a key that servers own: which server owns each shard, and how shards are sent there and back.

Both sides know the lengths of all messages from the placement and the codec that they agreed on. The header of a
message tells whether its values are encoded: weights, and what is no sum, never are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs import compression
from mpikv.codecs.base import State
from mpikv.codecs.compression import Codecs
from mpikv.codecs.identity import IDENTITY
from mpikv.codecs.residuals import Span
from mpikv.observe.recorder import Recorder
from mpikv.placement.keys import KeyInfo, partitions
from mpikv.placement.placement import Placement
from mpikv.spaces.base import Space
from mpikv.strategies.device_pieces import pieces_in
from mpikv.strategies.pieces import Pieces
from mpikv.transports import wire

INLINE_BYTES = 1 << 16  # from here on two more messages cost less than copying in and out of one


class Route(NamedTuple):
    """How one shard, elements [begin, end) of a key, is sent to its owner.

    pieces: their bounds in the key's value. inline: sent behind its header, in one message. n_bytes: of a push as sent.
    """

    owner: int
    begin: int
    end: int
    pieces: tuple[tuple[int, int], ...]
    inline: bool
    n_bytes: int


class PieceMessages(NamedTuple):
    """In place of an array: the messages of a push that is encoded already, or of an answer decoded later, on a GPU."""

    by_piece: Mapping[Span, HostArray]


class AnswerBuffer:
    """Receives the answers to a pull of one key, piece by piece, into `array`, (n,) in the key's dtype.

    encoded: decodes them; None: they are received uncompressed, directly into the array.
    """

    def __init__(self, array: HostArray | PieceMessages, encoded: Pieces | None) -> None:
        self.array, self._encoded = array, encoded
        self._data: list[tuple[Span, HostArray]] = []

    def memory_for(self, begin: int, end: int) -> HostArray:
        if isinstance(self.array, PieceMessages):
            return self.array.by_piece[begin, end]
        if self._encoded is None:
            return self.array[begin:end]
        data: HostArray = np.empty(self._encoded.wire_bytes((begin, end)), np.uint8)
        self._data.append(((begin, end), data))
        return data

    def complete(self) -> HostArray | PieceMessages:
        for piece, data in self._data:
            assert self._encoded is not None
            assert not isinstance(self.array, PieceMessages)
            self._encoded.put(data, self.array[slice(*piece)])
        return self.array


class ClientKey:
    """One key as its client sees it.

    space: of its values on this worker. encoded: the pieces of pushes, with the codec's states. returned: the pieces of
    answers that are decoded in host memory. can_ask_small: whether `Client.ask_small` can do it. pushers: the workers
    that push it; none: all. whole: whether its optimizer needs all of a shard. replicated: see `Placement`.
    answering: the routes of pulls.
    """

    def __init__(
        self,
        info: KeyInfo,
        placement: Placement,
        codecs: Codecs = compression.of_text,
        *,
        space: Space | None = None,
        recorder: Recorder | None = None,
        pushers: Sequence[int] = (),
        whole: bool = False,
    ) -> None:
        self.pushers, self.whole = pushers, whole
        self.info, self.compression = info, codecs(info.codec)
        self.sends_uncompressed = self.compression.push == IDENTITY
        self._returns_uncompressed = self.compression.pull == IDENTITY
        self.encoded = pieces_in(space, info, self.compression.push, recorder)
        self.returned = Pieces(info, self.compression.pull, recorder)
        self._space, self._recorder = space, recorder
        self.pushed, self.last_uncompressed = 0, False
        self.use_placement(placement)

    def use_placement(self, placement: Placement) -> None:
        self.placement = placement
        self.routes = []
        for shard in placement.shards:
            pieces = partitions(shard.begin, shard.end, placement.partition_elems)
            n_bytes = sum(self.compression.push.wire_bytes(end - begin, self.info.dtype) for begin, end in pieces)
            self.routes.append(Route(*shard, pieces, len(pieces) == 1 and n_bytes <= INLINE_BYTES, n_bytes))
        self.replicated = placement.replicated
        self.answering = self.routes[:1] if placement.first_answers else self.routes
        one_small = len(self.routes) == 1 and self.routes[0].inline
        self.can_ask_small = one_small and self._returns_uncompressed
        self.encoded.recut(self.encoded.states, self.pieces)

    @property
    def answers_uncompressed(self) -> bool:
        """Whether answers to a pull are uncompressed: before this worker's first push, and after one of no sum."""
        return self._returns_uncompressed or not self.pushed or self.last_uncompressed

    def encode(
        self, total: HostArray | PieceMessages, begin: int, end: int, *, uncompressed: bool = False
    ) -> HostArray:
        """Elements [begin, end) of a push as they are sent. uncompressed: do not encode them."""
        if isinstance(total, PieceMessages):
            return total.by_piece[begin, end]
        if self.sends_uncompressed or uncompressed:
            return total[begin:end]
        return self.encoded.encode(total, (begin, end))

    @cached_property
    def returned_in_space(self) -> Pieces:
        return pieces_in(self._space, self.info, self.compression.pull, self._recorder)

    # --- states

    def codec_states(self) -> list[tuple[int, int, State]]:
        states = self.encoded.states_on_host()
        return [(*piece, states[piece]) for piece in self.pieces if states.get(piece)]

    def take_codec_states(self, pieces: Mapping[Span, State]) -> None:
        """Replace the states of the codec of this worker's pushes. pieces: states by pieces [begin, end)."""
        self.encoded.recut(pieces, self.pieces)

    @property
    def pieces(self) -> list[Span]:
        routes = self.routes[:1] if self.replicated else self.routes
        return [piece for route in routes for piece in route.pieces]

    def encoded_once(self, total: HostArray) -> PieceMessages:
        """The messages of a push that several owners get."""
        return PieceMessages({piece: self.encoded.encode(total, piece) for piece in self.pieces})

    def first_values(self, value: HostArray) -> Iterator[tuple[int, wire.Header, bytes]]:
        """The messages that give each owner its shard's first values: server, header, payload."""
        info = self.info
        for shard in self.placement.shards:
            text: dict[str, Any] = {
                "key": info.key,
                "shape": info.shape,
                "dtype": str(info.dtype),
                "begin": shard.begin,
                "part": self.placement.partition_elems,
                "whole": self.whole,
                "version": self.pushed,
                "codec": info.codec,
                "space": info.space,
                "pushers": list(self.pushers),
                "answers": shard.owner == self.answering[0].owner,
            }
            payload = wire.with_text(json.dumps(text).encode(), value[shard.begin : shard.end].tobytes())
            yield shard.owner, wire.Header(wire.INIT, info.id), payload
