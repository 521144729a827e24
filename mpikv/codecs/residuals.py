"""States of codecs when a key is cut anew: what is owed of an element stays owed, whichever piece it is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mpikv.codecs.base import Codec, State

Span = tuple[int, int]


def cut_anew(codec: Codec, states: Mapping[Span, State], pieces: Iterable[Span]) -> dict[Span, State]:
    """Return the states of `pieces`, [begin, end), from those of pieces of the same key.

    A piece that is among them keeps its state, if it is one of this codec: files may have those of another one. Else
    residuals are carried over, as far as they are there; what else a codec remembers of a piece starts anew. Pieces of
    which nothing is known have no state.
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
