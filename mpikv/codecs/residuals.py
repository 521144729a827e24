"""Residuals when a key is cut anew: what is owed of an element stays owed, whichever piece it is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mpikv.codecs.base import Codec, State
from mpikv.codecs.blocks import residual_of


def cut_anew(codec: Codec, states: Mapping[int, State], pieces: Iterable[tuple[int, int]]) -> dict[int, State]:
    """Return states of `pieces`, (begin, end), from those of other pieces of the same key, by their first elements.

    Residuals are carried over, as far as they are there; what else a codec remembers of a piece starts anew.
    """
    old = [(begin, state["residual"]) for begin, state in sorted(states.items()) if "residual" in state]
    if not old:
        return {}
    owed = residual_of(max(begin + residual.size for begin, residual in old))["residual"]
    for begin, residual in old:
        owed[begin : begin + residual.size] = residual
    new = {begin: codec.init(end - begin) for begin, end in pieces}
    for begin, state in new.items():
        known = owed[begin : begin + state["residual"].size]
        state["residual"][: known.size] = known
    return new
