"""States of codecs when a key is cut anew: what is owed of an element stays owed, whichever piece it is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mpikv.codecs.base import Codec, State

Span = tuple[int, int]


def cut_anew(codec: Codec, states: Mapping[Span, State], pieces: Iterable[Span]) -> dict[Span, State]:
    """Return the states of `pieces`, [begin, end), from those of pieces of the same key.

    A piece that is among them keeps its state. Of another one residuals are carried over, as far as they are there;
    what else a codec remembers of a piece starts anew. Pieces of which nothing is known have no state.
    """
    found: dict[Span, State] = {}
    for begin, end in pieces:
        if (begin, end) in states:
            found[begin, end] = {name: value.copy() for name, value in states[begin, end].items()}
            continue
        for (first, last), state in states.items():
            low, high = max(begin, first), min(end, last)
            if low < high and "residual" in state:
                new = found.setdefault((begin, end), codec.init(end - begin))
                new["residual"][low - begin : high - begin] = state["residual"][low - first : high - first]
    return found
