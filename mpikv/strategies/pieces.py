"""One key's values in the encoding of one codec, piece by piece, and the codec's state of each piece.

A piece is encoded, sent and decoded by itself, in one message. It is long enough that a message's fixed cost is small
beside that of its bytes, and short enough that one piece is in flight while the next is encoded. When a key is cut into
other pieces, every element keeps its residual (codecs/residuals).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.codecs.base import Codec, State
from mpikv.codecs.identity import IDENTITY
from mpikv.codecs.residuals import cut_anew
from mpikv.collectives.stages import Span, cut
from mpikv.engine.operation import Steps
from mpikv.observe.recorder import Part, Recorder
from mpikv.placement.algorithms import LINK_SEGMENT_BYTES
from mpikv.placement.keys import KeyInfo

MOST_ELEMS = 1 << 18  # of a piece: 1 MiB of float32, some milliseconds to encode
STEP_ELEMS = 1 << 10  # pieces end at multiples of it, where no codec has a byte that encodes elements of both sides

_BYTES = np.dtype(np.uint8)


def piece_elems(codec: Codec, dtype: np.dtype[Any]) -> int:
    """The most elements of a piece. Only the codec and dtype decide it, so that bits do not depend on hosts or paths.

    A codec that works on rows gets whole rows, and at least as many as a row has elements: the factors that it sends of
    fewer rows would be as long.
    """
    if (row := codec.row_elems) > 1:
        return row * max(row, MOST_ELEMS // row)
    messages = -(-codec.wire_bytes(MOST_ELEMS, dtype) // LINK_SEGMENT_BYTES)
    return max(STEP_ELEMS, MOST_ELEMS // max(1, messages) // STEP_ELEMS * STEP_ELEMS)


class Pieces:
    """One key's pieces in the encoding of one codec. states: the codec's, by piece.

    encoded_from_bytes, encoded_bytes: of all pushes, before and after encoding.
    """

    def __init__(self, info: KeyInfo, codec: Codec, recorder: Recorder | None = None) -> None:
        self._codec, self._dtype, self._key = codec, info.dtype, info.key
        self.recorder = Recorder() if recorder is None else recorder
        self._longest = piece_elems(codec, info.dtype)
        self._wire_dtype = codec.wire_dtype(info.dtype)
        self.states: dict[Span, State] = {}
        self.encoded_from_bytes = self.encoded_bytes = 0

    def of(self, span: Span) -> list[Span]:
        return list(cut(span, 1, self._longest))

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
        values = out if dtype == out.dtype else self.empty(out.size, dtype)
        self.decode(data, values)
        if values is not out:
            out[...] = values

    def add(self, data: HostArray, out: HostArray) -> None:
        """Decode a piece and add it to `out`, in the dtype of sums."""
        part = self._part() if self.recorder.on else None
        self._codec.add(self._as_encoded(data), out)
        if part is not None:
            part.done("decode")

    def _part(self) -> Part | None:
        return None if self._codec == IDENTITY else self.recorder.begin(self._key)

    # --- a round

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        return np.empty(n_elems, dtype)

    def encoding(self, values: HostArray, outgoing: Sequence[tuple[int, Span]], uses: int) -> Encoding:
        return Encoding(self, values, outgoing, uses)

    def message_buffers(self, n_bytes: Sequence[int], window: int) -> list[HostArray]:
        """Buffers for messages of these lengths, which are received in this order, at most `window` at a time."""
        longest, n_buffers = max(n_bytes, default=0), min(window, len(n_bytes))
        buffers = [np.empty(longest, np.uint8) for _ in range(n_buffers)]
        return [buffers[i % n_buffers][:n] for i, n in enumerate(n_bytes)]

    # --- states

    @property
    def held_bytes(self) -> int:
        return sum(array.nbytes for state in self.states.values() for array in state.values())

    def recut(self, states: Mapping[Span, State], pieces: Iterable[Span]) -> None:
        """Use these pieces from now on. states: of the pieces so far, whose bounds may differ."""
        self.states = cut_anew(self._codec, states, pieces)

    def states_on_host(self) -> Mapping[Span, State]:
        return self.states

    def states_in(self, span: slice) -> Iterator[tuple[int, int, State]]:
        """The states of a span's elements: begin and end, counted from the span's begin, and the state."""
        inside = ((max(begin, span.start), min(end, span.stop)) for begin, end in sorted(self.states))
        cuts = [(begin, end) for begin, end in inside if begin < end]
        for (begin, end), state in cut_anew(self._codec, self.states_on_host(), cuts).items():
            if state:
                yield begin - span.start, end - span.start, state


def encoded_bytes(pushed: Iterable[Pieces]) -> dict[str, int]:
    """Bytes of all pushes before and after encoding, for `store.stats()`; empty if nothing was encoded."""
    all_pushed = list(pushed)
    before = sum(one.encoded_from_bytes for one in all_pushed)
    after = sum(one.encoded_bytes for one in all_pushed)
    return {"encoded_from_bytes": before, "encoded_bytes": after} if before else {}


class Encoding:
    """The encoded values of one round: the messages that a `Sender` sends, each kept until its last use.

    outgoing: pairs of a rank and a piece. uses: how often `data` is called for each piece.
    """

    def __init__(self, pieces: Pieces, values: HostArray, outgoing: Sequence[tuple[int, Span]], uses: int) -> None:
        self.pieces, self._values, self._outgoing, self._uses = pieces, values, outgoing, uses
        self._kept: dict[Span, tuple[HostArray, int]] = {}

    def __len__(self) -> int:
        return len(self._outgoing)

    def __getitem__(self, i: int, /) -> tuple[int, HostArray]:
        dest, piece = self._outgoing[i]
        return dest, self.data(piece)

    def begin(self) -> Steps[None]:
        """Prepare for the first message; on the host there is nothing to do."""
        yield from ()

    def data(self, piece: Span) -> HostArray:
        if (kept := self._kept.pop(piece, None)) is None:
            kept = self.pieces.encode(self._values, piece), self._uses
        data, left = kept
        if left > 1:
            self._kept[piece] = data, left - 1
        return data
