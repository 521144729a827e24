"""States of optimizers as values: which elements of a key they are of, how they are cut and joined.

There is one record, a `Part`: the state of some elements of a key, with the shape and dtype of the key's whole value.
states_file.py says how parts are written into files and messages.

A state is cut and joined like its weight: arrays along the elements; numbers are copied, and must agree again when
parts are joined, all but "t", of which the largest counts (parts of an asynchronous store may have seen different
numbers of updates).

The state of a row-sparse key is that of the rows that were pushed. It has one array more, `ROWS`: the ids of its rows
in ascending order. The other arrays are flat, one row after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import host_view, is_device
from mpikv.common.checks import shown
from mpikv.errors import UnsupportedError
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.step import State
from mpikv.placement.keys import Key, KeyInfo
from mpikv.spaces.base import Space

ROWS = "rows"


class Part(NamedTuple):
    """The state of the elements [begin, end) of a key, whose whole value has this shape and dtype.

    worker: whose codec has it; None: it is the optimizer's, of which there is one.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int
    end: int
    state: State
    worker: int | None = None

    @property
    def n_elems(self) -> int:
        """The elements of the whole value; 1 for a 0-dimensional one."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether it is the state of all elements."""
        return (self.begin, self.end) == (0, self.n_elems)


def part_of(info: KeyInfo, begin: int, end: int, state: State) -> Part:
    """Make the state of some elements of a store's key."""
    return Part(info.key, info.shape, info.dtype, begin, end, state)


# --- spaces


def on_host(state: State) -> State:
    """The state with its arrays in host memory, as all else here takes them."""
    return {name: host_view(value, name) if is_device(value) else value for name, value in state.items()}


def in_space(state: State, space: Space) -> State:
    """The state with its arrays, which are in host memory, in a space."""
    return {name: space.from_host(value) if isinstance(value, np.ndarray) else value for name, value in state.items()}


# --- slices


def slice_state(state: State, begin: int, end: int, n_elems: int) -> State:
    """The state of the elements [begin, end) of a key of n_elems; arrays are copied unless it is all of them.

    Raises UnsupportedError where an array does not run along the elements, ValueError for bounds outside the key.
    """
    if not 0 <= begin <= end <= n_elems:
        raise ValueError(f"elements [{begin}, {end}) are not within a key of {n_elems}")
    if (begin, end) == (0, n_elems):
        return dict(state)
    result: State = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            if value.shape != (n_elems,):
                raise UnsupportedError(
                    f"{shown(name)} of a state has shape {value.shape}, so it cannot be cut like its {n_elems} elements"
                )
            value = value[begin:end].copy()  # noqa: PLW2901
        result[name] = value
    return result


def join_states(parts: Sequence[tuple[int, int, State]], n_elems: int | None = None) -> State:
    """The state of a whole key from (begin, end, state) of its slices, in any order; empty ones are left out.

    n_elems: what the key has; None: where the last part ends. Raises ValueError where parts are missing, overlap, hold
    different things or different numbers ("t" aside: the largest counts).
    """
    ordered = sorted((part for part in parts if part[0] < part[1]), key=lambda part: part[0])
    ordered = ordered or list(parts[:1])
    if not ordered:
        raise ValueError("there are no parts to join")
    bounds = [0, *(end for _, end, _ in ordered)]
    if bounds[:-1] != [begin for begin, _, _ in ordered] or n_elems not in (None, bounds[-1]):
        cut = ", ".join(f"[{begin}, {end})" for begin, end, _ in ordered)
        raise ValueError(f"parts {cut} do not cover a key of {bounds[-1] if n_elems is None else n_elems} elements")
    first = ordered[0][2]
    if len(ordered) == 1:
        return dict(first)
    for _, _, state in ordered[1:]:
        if set(state) != set(first):
            raise ValueError(f"parts of a state hold different things: {sorted(first)} and {sorted(state)}")
    return {name: _join(name, ordered) for name in first}


def _join(name: str, parts: Sequence[tuple[int, int, State]]) -> Any:
    values = [state[name] for _, _, state in parts]
    if name == "t":
        return max(values)
    if not any(isinstance(value, np.ndarray) for value in values):
        # NaN, which equals nothing, agrees with NaN.
        if all(value == values[0] or (value != value and values[0] != values[0]) for value in values):  # noqa: PLR0124
            return values[0]
        raise ValueError(f"parts of a state have different {shown(name)}: {', '.join(str(value) for value in values)}")
    for (begin, end, _), value in zip(parts, values, strict=True):
        if not isinstance(value, np.ndarray) or value.shape != (end - begin,) or value.dtype != values[0].dtype:
            what = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else repr(value)
            raise ValueError(
                f"{shown(name)} in the part [{begin}, {end}) of a state is {what}, not one value per element"
            )
    return np.concatenate(values)


# --- rows of row-sparse keys


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
