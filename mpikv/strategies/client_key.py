"""A key as a worker sees it whose values live with servers: where its shards are, and how they travel there and back.

Both sides know the lengths of what travels, from the placement and the codec that they agreed on. Each message says
whether its values travel encoded or as they are, so that each worker chooses by itself what is faster on its way to the
servers: a round of a key is timed from its push until the answer to a pull that was made behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs import compression
from mpikv.codecs.base import State
from mpikv.codecs.choice import CodecChoice
from mpikv.codecs.compression import Codecs
from mpikv.codecs.identity import IDENTITY
from mpikv.codecs.residuals import Span
from mpikv.placement.keys import KeyInfo, partitions
from mpikv.placement.placement import Placement
from mpikv.spaces.base import Space
from mpikv.strategies.device_pieces import DevicePieces, pieces_in
from mpikv.strategies.pieces import Pieces
from mpikv.transports import wire

INLINE_BYTES = 1 << 16  # from here on two more messages cost less than copying in and out of one


class Route(NamedTuple):
    """How one shard travels. parts: bounds in the key's value. inline: behind its header.

    n_bytes: of a push of it, on its way.
    """

    owner: int
    begin: int
    end: int
    parts: tuple[tuple[int, int], ...]
    inline: bool
    n_bytes: int


class PieceMessages(NamedTuple):
    """In place of an array: a push that has been encoded already, or memory for an answer that is decoded elsewhere.

    by_piece: the bytes on their way of elements [begin, end).
    """

    by_piece: Mapping[Span, HostArray]


class Value:
    """Where the answers to a pull of one key go: `array`, (n,) in the key's dtype, piece by piece.

    encoded: how they come; None: as they are, straight into the array.
    """

    def __init__(self, array: HostArray | PieceMessages, encoded: Pieces | None) -> None:
        self.array, self._encoded = array, encoded
        self._data: list[tuple[Span, HostArray]] = []

    def piece(self, begin: int, end: int) -> HostArray:
        """Memory for the answer to elements [begin, end)."""
        if isinstance(self.array, PieceMessages):
            return self.array.by_piece[begin, end]
        if self._encoded is None:
            return self.array[begin:end]
        data: HostArray = np.empty(self._encoded.wire_bytes((begin, end)), np.uint8)
        self._data.append(((begin, end), data))
        return data

    def complete(self) -> HostArray | PieceMessages:
        """The array, when all answers are there."""
        for piece, data in self._data:
            assert self._encoded is not None
            assert not isinstance(self.array, PieceMessages)
            self._encoded.put(data, self.array[slice(*piece)])
        return self.array


class ClientKey:
    """One key as its client sees it.

    codecs: makes its codecs of their text. choice: whether its values travel encoded; None: they always do. space: what
    they are in on this worker; None: host memory.
    encoded: its pushes, and what their codec remembers of them. returned: its answers, for arrays in host memory.
    """

    def __init__(
        self,
        info: KeyInfo,
        placement: Placement,
        codecs: Codecs = compression.of_text,
        choice: CodecChoice | None = None,
        space: Space | None = None,
    ) -> None:
        self.info, self.compression = info, codecs(info.codec)
        self.sends_as_it_is, self._comes_as_it_is = self.compression.push == IDENTITY, self.compression.pull == IDENTITY
        self.encoded, self.returned = pieces_in(space, info, self.compression.push), Pieces(info, self.compression.pull)
        self._space = space
        self.choice, self._timed = choice, False
        self.pushed = 0
        self.move(placement)

    def move(self, placement: Placement) -> None:
        """The key lives there from now on."""
        self.placement = placement
        self.routes = []
        for shard in placement.shards:
            parts = partitions(shard.begin, shard.end, placement.part_elems)
            n_bytes = sum(self.compression.push.wire_bytes(end - begin, self.info.dtype) for begin, end in parts)
            self.routes.append(Route(*shard, parts, len(parts) == 1 and n_bytes <= INLINE_BYTES, n_bytes))
        self.encoded.recut(self.encoded.states, self._pieces)
        one_small = len(self.routes) == 1 and self.routes[0].inline
        self.smallest = one_small and self._comes_as_it_is and self.choice is None

    @property
    def plain(self) -> bool:
        """Whether answers to a pull come as they are: also before this worker's first push."""
        return self._comes_as_it_is or not self.pushed

    def encode(self, total: HostArray | PieceMessages, begin: int, end: int, *, plain: bool = False) -> HostArray:
        """What travels of elements [begin, end) of a push. plain: the values as they are."""
        if isinstance(total, PieceMessages):
            return total.by_piece[begin, end]
        if self.sends_as_it_is or plain:
            return total[begin:end]
        return self.encoded.encode(total, (begin, end))

    def encodes_on_device(self, *, plain: bool) -> bool:
        """Whether a push is encoded in device memory, before its messages. plain: it travels as it is."""
        return isinstance(self.encoded, DevicePieces) and not plain

    @cached_property
    def returned_here(self) -> Pieces:
        """Its answers, for arrays in `space`."""
        return pieces_in(self._space, self.info, self.compression.pull)

    def decodes_on_device(self, *, plain: bool) -> bool:
        """Whether the answer to a pull is decoded in device memory, behind its messages. plain: it comes as it is."""
        return isinstance(self.returned_here, DevicePieces) and not plain

    # --- encoded or as it is, of a key that has the choice

    def begin(self, total: HostArray, now_s: float) -> HostArray:
        """A push: what travels, with what earlier ones owe where it travels as it is."""
        assert self.choice is not None
        if not self._timed:
            self.choice.begin(now_s)
            self._timed = True
        return self.encoded.with_owed(total) if self.choice.plain else total

    def end(self, now_s: float) -> None:
        """The answer to a pull has come."""
        assert self.choice is not None
        if self._timed:
            self._timed = False
            self.choice.end(now_s)
            if self.choice.exchange_due:
                self.choice.agree([self.choice.times])

    # --- states

    def codec_states(self) -> list[tuple[int, int, State]]:
        """What the codec of this worker's pushes remembers, by pieces."""
        states = self.encoded.states_on_host()
        return [(*piece, states[piece]) for piece in self._pieces if states.get(piece)]

    def take_codec_states(self, pieces: Mapping[Span, State]) -> None:
        """Remember this instead: states of the pieces [begin, end)."""
        self.encoded.recut(pieces, self._pieces)

    @property
    def _pieces(self) -> list[Span]:
        return [part for route in self.routes for part in route.parts]

    def value(self, array: HostArray | PieceMessages, *, plain: bool) -> Value:
        """Where the answers to a pull go. plain: they come as they are."""
        return Value(array, None if plain else self.returned)

    def first_values(self, value: HostArray) -> Iterator[tuple[int, wire.Header, bytes]]:
        """What tells each server that it owns a part of the key, and the values there: server, header, payload."""
        info = self.info
        for shard in self.placement.shards:
            text = {"key": info.key, "shape": info.shape, "dtype": str(info.dtype), "begin": shard.begin}
            text |= {
                "part": self.placement.part_elems,
                "version": self.pushed,
                "codec": info.codec,
                "space": info.space,
            }
            payload = wire.with_text(json.dumps(text).encode(), value[shard.begin : shard.end].tobytes())
            yield shard.owner, wire.Header(wire.INIT, info.id), payload
