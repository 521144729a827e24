"""One key's values in the encoding of one codec, piece by piece, and the codec's state of each piece.

A piece is encoded, sent and decoded by itself, in one message. When a key is cut into other pieces, every element keeps
its residual (codecs/residuals).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.codecs.base import Codec, State
from mpikv.codecs.identity import IDENTITY
from mpikv.codecs.residuals import cut_anew
from mpikv.collectives.stages import Span
from mpikv.observe.recorder import Part, Recorder
from mpikv.placement.keys import KeyInfo

_BYTES = np.dtype(np.uint8)


class Pieces:
    """One key's pieces in the encoding of one codec. states: the codec's, by piece.

    encoded_from_bytes, encoded_bytes: of all pushes, before and after encoding.
    """

    def __init__(self, info: KeyInfo, codec: Codec, recorder: Recorder | None = None) -> None:
        self._codec, self._dtype, self._key = codec, info.dtype, info.key
        self.recorder = Recorder() if recorder is None else recorder
        self._wire_dtype = codec.wire_dtype(info.dtype)
        self.states: dict[Span, State] = {}
        self.encoded_from_bytes = self.encoded_bytes = 0

    def wire_bytes(self, piece: Span) -> int:
        return self._codec.wire_bytes(piece[1] - piece[0], self._dtype)

    def encode(self, values: HostArray, piece: Span) -> HostArray:
        """Encode a piece. values: (n,), the whole key's, in its dtype or in a wider one that they were cast to."""
        part = self._part() if self.recorder.on else None
        data = self._codec.encode(values[slice(*piece)].astype(self._dtype, copy=False), self._state(piece))
        self._count(piece, data)
        if part is not None:
            part.done("encode")
        return data

    def _state(self, piece: Span) -> State:
        if (state := self.states.get(piece)) is None:
            state = self.states[piece] = self._new_state(piece[1] - piece[0])
        return state

    def _empty(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        return np.empty(n_elems, dtype)

    def _new_state(self, n_elems: int) -> State:
        return self._codec.init(n_elems)

    def _count(self, piece: Span, data: HostArray) -> None:
        if self._codec != IDENTITY:
            self.encoded_from_bytes += (piece[1] - piece[0]) * self._dtype.itemsize
            self.encoded_bytes += data.nbytes

    def _as_encoded(self, data: HostArray) -> HostArray:
        return data if self._wire_dtype is None or data.dtype != _BYTES else data.view(self._wire_dtype)

    def decode(self, data: HostArray, out: HostArray) -> None:
        """Decode a piece into `out`, in the dtype of sums. data: what `encode` returned, or its bytes."""
        part = self._part() if self.recorder.on else None
        self._codec.decode(self._as_encoded(data), out)
        if part is not None:
            part.done("decode")

    def put(self, data: HostArray, out: HostArray) -> None:
        """Decode a piece into `out`, in the key's dtype."""
        dtype = sum_dtype(out.dtype)
        values = out if dtype == out.dtype else self._empty(out.size, dtype)
        self.decode(data, values)
        if values is not out:
            out[...] = values

    def _part(self) -> Part | None:
        return None if self._codec == IDENTITY else self.recorder.begin(self._key)

    # --- states

    def recut(self, states: Mapping[Span, State], pieces: Iterable[Span]) -> None:
        """Use these pieces from now on. states: of the pieces so far, whose bounds may differ."""
        self.states = cut_anew(self._codec, states, pieces)

    def states_on_host(self) -> Mapping[Span, State]:
        return self.states


def encoded_bytes(pushed: Iterable[Pieces]) -> dict[str, int]:
    """Bytes of all pushes before and after encoding, for `store.stats()`; empty if nothing was encoded."""
    all_pushed = list(pushed)
    before = sum(one.encoded_from_bytes for one in all_pushed)
    after = sum(one.encoded_bytes for one in all_pushed)
    return {"encoded_from_bytes": before, "encoded_bytes": after} if before else {}
