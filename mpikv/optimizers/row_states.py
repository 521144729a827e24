"""States of row-sparse keys: those of the rows that were pushed, as values to save, cut and join.

A state is one of `optimizers.base` with one array more: `ROWS`, the ids of its rows in ascending order. The other
arrays are flat, one row after another. It stands in a `states.Part` like any other state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.states import Part, part_of
from mpikv.optimizers.step import State
from mpikv.placement.keys import KeyInfo

ROWS = "rows"


def slice_rows(info: KeyInfo, state: State, begin: int, end: int) -> Part:
    """The states of the rows [begin, end), as the part of a key."""
    columns = _columns(info)
    inside = (state[ROWS] >= begin) & (state[ROWS] < end)
    cut = {
        name: value.reshape(inside.size, -1 if name == ROWS else columns)[inside].reshape(-1)
        if isinstance(value, np.ndarray) and inside.size
        else value
        for name, value in state.items()
    }
    return part_of(info, begin * columns, end * columns, cut)


def join_rows(info: KeyInfo, parts: Sequence[Part]) -> Part:
    """The state of a whole key from its parts, in any order; numbers are those of the part with the most updates."""
    ordered = sorted(parts, key=lambda part: part.begin)
    state = dict(max(ordered, key=lambda part: part.state["t"]).state)
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            # An array may be missing where an owner has had no update since a hyperparameter was changed.
            if not all(name in part.state for part in ordered):
                raise ValueError(f"parts of the states of key {info.key!r} hold different things")
            state[name] = np.concatenate([part.state[name] for part in ordered])
    return part_of(info, 0, info.n_elems, state)


def check_rows(optimizer: Optimizer, info: KeyInfo, state: State) -> None:
    """Raise ValueError where a state (from a file, say) cannot be that of rows of a key under this optimizer."""
    ids = state.get(ROWS)
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError("its states are those of a dense key, and the key is row-sparse here")
    if ids.size and (ids[0] < 0 or ids[-1] >= info.shape[0] or not (ids[1:] > ids[:-1]).all()):
        raise ValueError(f"its states are of rows that no array of shape {info.shape} has")
    weight = np.zeros(ids.size * _columns(info), info.dtype)
    optimizer.check_state(weight, {name: value for name, value in state.items() if name != ROWS})


def _columns(info: KeyInfo) -> int:
    return info.n_elems // info.shape[0] if info.shape[0] else 0
