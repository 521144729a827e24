"""Moves the states of codecs when a key is cut into other pieces: each element keeps its residual."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mpikv.codecs.base import Codec, State

Span = tuple[int, int]


def cut_anew(codec: Codec, states: Mapping[Span, State], pieces: Iterable[Span]) -> dict[Span, State]:
    """Return the states of `pieces`, each [begin, end), from the states of other pieces of the same key.

    A piece that was there before keeps its state, if it is a state of this codec: a file may hold those of another one.
    A new piece gets the residuals of its elements, as far as they are known; the rest of its state begins anew. A piece
    of which no element is known gets no state.
    """
    found: dict[Span, State] = {}
    for begin, end in pieces:
        if (same := states.get((begin, end))) is not None and _form(same) == _form(codec.init(end - begin)):
            found[begin, end] = {name: value.copy() for name, value in same.items()}
            continue
        for (first, last), state in states.items():
            low, high = max(begin, first), min(end, last)
            if low < high and "residual" in state:
                new = found.setdefault((begin, end), codec.init(end - begin))
                if "residual" in new:
                    new["residual"][low - begin : high - begin] = state["residual"][low - first : high - first]
    return found


def _form(state: State) -> dict[str, object]:
    return {name: (value.dtype, value.shape) for name, value in state.items()}
