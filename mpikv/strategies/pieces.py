"""What travels of one key's values by one codec, piece by piece, and what the codec remembers of each piece.

A piece is encoded, sent and decoded by itself, in one message: long enough that a message costs little beside its
bytes, short enough that one is under way while the next is encoded. A codec's states belong to pieces. Where a key is
cut anew, what is owed of each element goes with it (codecs/residuals).

Cost: one pass over the values in each direction. Memory: the states; of a round what is encoded and not sent yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.codecs.base import Codec, State
from mpikv.codecs.identity import IDENTITY
from mpikv.codecs.residuals import cut_anew
from mpikv.collectives.stages import LINK_SEGMENT_BYTES, Span, cut
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo

MOST_ELEMS = 1 << 18  # of a piece: 1 MiB of float32, some milliseconds to encode
STEP_ELEMS = 1 << 10  # pieces end at multiples of it: no codec has bytes there that belong to two of them

_BYTES = np.dtype(np.uint8)


def piece_elems(codec: Codec, dtype: np.dtype[Any]) -> int:
    """The most elements of a piece. It follows from the codec alone, so that bits do not depend on hosts or paths.

    A codec with rows has whole rows, and at least as many as a row has elements: factors of fewer would be as long.
    """
    if (row := codec.row_elems) > 1:
        return row * max(row, MOST_ELEMS // row)
    messages = -(-codec.wire_bytes(MOST_ELEMS, dtype) // LINK_SEGMENT_BYTES)
    return max(STEP_ELEMS, MOST_ELEMS // max(1, messages) // STEP_ELEMS * STEP_ELEMS)


class Pieces:
    """One key's, by one codec. encoded_from_bytes, encoded_bytes: all that was, before and after. states: by piece."""

    def __init__(self, info: KeyInfo, codec: Codec) -> None:
        self._codec, self._dtype = codec, info.dtype
        self._longest = piece_elems(codec, info.dtype)
        self._wire_dtype = codec.wire_dtype(info.dtype)
        self.states: dict[Span, State] = {}
        self._has_residual = False  # whether a state may owe something that the next round could pay
        self.encoded_from_bytes = self.encoded_bytes = 0

    def of(self, span: Span) -> list[Span]:
        """The pieces of elements [begin, end)."""
        return list(cut(span, 1, self._longest))

    def wire_bytes(self, piece: Span) -> int:
        """How many bytes a piece is on its way."""
        return self._codec.wire_bytes(piece[1] - piece[0], self._dtype)

    def encode(self, values: HostArray, piece: Span) -> HostArray:
        """What travels of a piece. values: (n,), in the key's dtype or a wider one that they were brought to."""
        data = self._codec.encode(values[slice(*piece)].astype(self._dtype, copy=False), self._state(piece))
        self._count(piece, data)
        return data

    def _state(self, piece: Span) -> State:
        """That of a piece which is encoded."""
        if (state := self.states.get(piece)) is None:
            state = self.states[piece] = self._new_state(piece[1] - piece[0])
        self._has_residual = self._has_residual or "residual" in state
        return state

    def _new_state(self, n_elems: int) -> State:
        return self._codec.init(n_elems)

    def _count(self, piece: Span, data: HostArray) -> None:
        """A piece was encoded."""
        if self._codec != IDENTITY:
            self.encoded_from_bytes += (piece[1] - piece[0]) * self._dtype.itemsize
            self.encoded_bytes += data.nbytes

    def with_residual(self, values: HostArray) -> HostArray:
        """Return the values of a round that travel as they are, with what earlier ones owe; then in new memory.

        values: (n,), in the key's dtype. What of a codec's remainder the dtype cannot hold stays with the codec
        until a round is encoded again.
        """
        if not self._has_residual:
            return values
        self._has_residual = False
        return self._plus_residuals(values)

    def _plus_residuals(self, values: HostArray) -> HostArray:
        """The values with what is owed, in new memory."""
        totals = values.astype(sum_dtype(self._dtype))
        for piece, state in self.states.items():
            if "residual" not in state:
                continue
            part, owed = totals[slice(*piece)], state["residual"]
            part += owed
            owed[...] = 0
            if part.dtype != self._dtype:
                with np.errstate(invalid="ignore", over="ignore"):
                    lost = part - part.astype(self._dtype).astype(part.dtype)
                np.copyto(owed, lost, where=np.isfinite(lost), casting="unsafe")
        with np.errstate(over="ignore"):
            return totals.astype(self._dtype, copy=False)

    def _as_encoded(self, data: HostArray) -> HostArray:
        """What a codec decodes, of bytes."""
        return data if self._wire_dtype is None or data.dtype != _BYTES else data.view(self._wire_dtype)

    def decode(self, data: HostArray, out: HostArray) -> None:
        """Write the values of a piece into `out`, in the dtype of the sums. data: what was encoded, or its bytes."""
        self._codec.decode(self._as_encoded(data), out)

    def put(self, data: HostArray, out: HostArray) -> None:
        """Write the values of a piece into `out`, in the key's dtype."""
        dtype = sum_dtype(out.dtype)
        values = out if dtype == out.dtype else self.empty(out.size, dtype)
        self.decode(data, values)
        if values is not out:
            out[...] = values

    def add(self, data: HostArray, out: HostArray) -> None:
        """Add the values of a piece to `out`."""
        self._codec.add(self._as_encoded(data), out)

    # --- a round

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """New memory of any content, for values."""
        return np.empty(n_elems, dtype)

    def encoding(self, values: HostArray, outgoing: Sequence[tuple[int, Span]], uses: int) -> Encoding:
        """One round's values. See `Encoding`."""
        return Encoding(self, values, outgoing, uses)

    def message_buffers(self, n_bytes: Sequence[int], window: int) -> list[HostArray]:
        """Memory for messages of so many bytes, of which `window` are received at a time, in their order."""
        longest, n_rows = max(n_bytes, default=0), min(window, len(n_bytes))
        rows = [np.empty(longest, np.uint8) for _ in range(n_rows)]
        return [rows[i % n_rows][:n] for i, n in enumerate(n_bytes)]

    def end(self) -> Steps[None]:
        """All messages have been sent, and taken: their memory is free."""
        yield from ()

    # --- states

    @property
    def held_bytes(self) -> int:
        """Of the states."""
        return sum(array.nbytes for state in self.states.values() for array in state.values())

    def recut(self, states: Mapping[Span, State], pieces: Iterable[Span]) -> None:
        """From now on these pieces travel. states: what is remembered of others that they may have been cut from."""
        self.states, self._has_residual = cut_anew(self._codec, states, pieces), True

    def states_on_host(self) -> Mapping[Span, State]:
        """The states, in host memory."""
        return self.states

    def states_in(self, span: slice) -> Iterator[tuple[int, int, State]]:
        """What is remembered of elements of a span alone: begin and end there, and the state."""
        inside = ((max(begin, span.start), min(end, span.stop)) for begin, end in sorted(self.states))
        cuts = [(begin, end) for begin, end in inside if begin < end]
        for (begin, end), state in cut_anew(self._codec, self.states_on_host(), cuts).items():
            if state:
                yield begin - span.start, end - span.start, state


def encoded_bytes(pushed: Iterable[Pieces]) -> dict[str, int]:
    """What `store.stats()` says of all pushes: bytes before and after; nothing where none was encoded."""
    all_pushed = list(pushed)
    before = sum(one.encoded_from_bytes for one in all_pushed)
    after = sum(one.encoded_bytes for one in all_pushed)
    return {"encoded_from_bytes": before, "encoded_bytes": after} if before else {}


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

    def begin(self) -> Steps[None]:
        """Do what has to be done before the first message."""
        yield from ()

    def data(self, piece: Span) -> HostArray:
        """What travels of it."""
        if (kept := self._kept.pop(piece, None)) is None:
            kept = self.pieces.encode(self._values, piece), self._uses
        data, left = kept
        if left > 1:
            self._kept[piece] = data, left - 1
        return data
