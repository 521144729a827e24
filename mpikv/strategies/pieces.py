"""What travels of one key's values by one codec, piece by piece, and what the codec remembers of each piece.

A piece is encoded, sent and decoded by itself, in one message: long enough that a message costs little beside its
bytes, short enough that one is under way while the next is encoded. A codec's states belong to pieces. Where a key is
cut anew they are joined, and cut again as its new pieces need them, so that nothing that is owed is lost.

Cost: one pass over the values in each direction. Memory: the states; of a round what is encoded and not sent yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.codecs.base import Codec, State
from mpikv.collectives.stages import LINK_SEGMENT_BYTES, Span, cut
from mpikv.keys import KeyInfo
from mpikv.optimizers.states import join_states, slice_state

MOST_ELEMS = 1 << 18  # of a piece: 1 MiB of float32, some milliseconds to encode
STEP_ELEMS = 1 << 10  # pieces end at multiples of it: no codec has bytes there that belong to two of them

_BYTES = np.dtype(np.uint8)


def piece_elems(codec: Codec, dtype: np.dtype[Any]) -> int:
    """The most elements of a piece. It follows from the codec alone, so that bits do not depend on hosts or paths."""
    messages = -(-codec.wire_bytes(MOST_ELEMS, dtype) // LINK_SEGMENT_BYTES)
    return max(STEP_ELEMS, MOST_ELEMS // max(1, messages) // STEP_ELEMS * STEP_ELEMS)


class Pieces:
    """One key's, by one codec. encoded_from_bytes, encoded_bytes: all that was, before and after. states: by piece."""

    def __init__(self, info: KeyInfo, codec: Codec) -> None:
        self._codec, self._dtype, self._n_elems = codec, info.dtype, info.n_elems
        self._longest = piece_elems(codec, info.dtype)
        self._wire_dtype = codec.wire_dtype(info.dtype)
        self.states: dict[Span, State] = {}
        self.encoded_from_bytes = self.encoded_bytes = 0
        self._whole: State | None = None

    def of(self, span: Span) -> list[Span]:
        """The pieces of elements [begin, end)."""
        return list(cut(span, 1, self._longest))

    def wire_bytes(self, piece: Span) -> int:
        """How many bytes a piece is on its way."""
        return self._codec.wire_bytes(piece[1] - piece[0], self._dtype)

    def encode(self, values: HostArray, piece: Span) -> HostArray:
        """What travels of a piece. values: (n,), in the key's dtype or a wider one that they were brought to."""
        if (state := self.states.get(piece)) is None:
            n = piece[1] - piece[0]
            state = self._codec.init(n) if self._whole is None else slice_state(self._whole, *piece, self._n_elems)
            self.states[piece] = state
        given = values[slice(*piece)].astype(self._dtype, copy=False)
        data = self._codec.encode(given, state)
        self.encoded_from_bytes += given.nbytes
        self.encoded_bytes += data.nbytes
        return data

    def _seen(self, data: HostArray) -> HostArray:
        """What a codec decodes, of bytes."""
        return data if self._wire_dtype is None or data.dtype != _BYTES else data.view(self._wire_dtype)

    def decode(self, data: HostArray, out: HostArray) -> None:
        """Write the values of a piece into `out`, in the dtype of the sums. data: what was encoded, or its bytes."""
        self._codec.decode(self._seen(data), out)

    def add(self, data: HostArray, out: HostArray) -> None:
        """Add the values of a piece to `out`."""
        self._codec.add(self._seen(data), out)

    # --- states

    @property
    def held_bytes(self) -> int:
        """Of the states."""
        states = [*self.states.values(), *([] if self._whole is None else [self._whole])]
        return sum(array.nbytes for state in states for array in state.values())

    def whole_state(self) -> State | None:
        """The states as that of one piece of the whole key; None where there is nothing to remember of all of it."""
        parts = [(*piece, state) for piece, state in self.states.items() if state]
        if self._whole is not None:  # of what has not travelled since the last cut
            ends = sorted({0, self._n_elems, *(bound for begin, end, _ in parts for bound in (begin, end))})
            there = {begin for begin, _, _ in parts}
            gaps = [(a, b) for a, b in pairwise(ends) if a not in there]
            parts += [(a, b, slice_state(self._whole, a, b, self._n_elems)) for a, b in gaps]
        covered = sum(end - begin for begin, end, _ in parts)
        return join_states(parts, self._n_elems) if parts and covered == self._n_elems else None

    def recut(self, state: State | None) -> None:
        """From now on pieces are others. state: what is remembered of the whole key."""
        self._whole, self.states = state, {}


class Encoding:
    """One round's values, each piece encoded when it is first asked for, and kept until it was asked for `uses` times.

    Also what a `Sender` sends: outgoing: pairs of a rank and a piece.
    """

    def __init__(self, pieces: Pieces, values: HostArray, outgoing: Sequence[tuple[int, Span]], uses: int) -> None:
        self.pieces, self._values, self._outgoing, self._uses = pieces, values, outgoing, uses
        self._kept: dict[Span, tuple[HostArray, int]] = {}

    def __len__(self) -> int:
        return len(self._outgoing)

    def __getitem__(self, i: int, /) -> tuple[int, HostArray]:
        dest, piece = self._outgoing[i]
        return dest, self.data(piece)

    def data(self, piece: Span) -> HostArray:
        """What travels of it."""
        if (kept := self._kept.pop(piece, None)) is None:
            kept = self.pieces.encode(self._values, piece), self._uses
        data, left = kept
        if left > 1:
            self._kept[piece] = data, left - 1
        return data
