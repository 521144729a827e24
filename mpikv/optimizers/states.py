"""States of optimizers as values: records of which elements of a key they belong to, cutting and joining.

A state is cut and joined like its weight. Arrays are cut and joined along the elements. Numbers are copied when a state
is cut, and must be equal when slices are joined; only of "t" the largest is taken, since the slices of an asynchronous
store may have had different numbers of updates.

The state of a row-sparse key is that of the rows that were pushed. It has one more array, `ROWS`: the ids of its rows
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


class StateRecord(NamedTuple):
    """The state of the elements [begin, end) of a key, whose whole value has this shape and dtype.

    worker: the rank of the worker whose codec's state it is; None: it is the optimizer's.
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
        """The number of elements of the whole value; 1 for a 0-dimensional one."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether it is the state of all elements."""
        return (self.begin, self.end) == (0, self.n_elems)


def record_of(info: KeyInfo, begin: int, end: int, state: State) -> StateRecord:
    """Make the record of the elements [begin, end) of a key."""
    return StateRecord(info.key, info.shape, info.dtype, begin, end, state)


def on_host(state: State) -> State:
    """Return the state with its arrays in host memory, as all functions below expect them."""
    return {name: host_view(value, name) if is_device(value) else value for name, value in state.items()}


def in_space(state: State, space: Space) -> State:
    """Return the state with its arrays, which are in host memory, in a space."""
    return {name: space.from_host(value) if isinstance(value, np.ndarray) else value for name, value in state.items()}


def slice_state(state: State, begin: int, end: int, n_elems: int) -> State:
    """Return the state of the elements [begin, end) of a key of n_elems; arrays are copied unless it is all of them.

    Raises UnsupportedError for an array without one value per element, ValueError for bounds outside the key.
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


def join_states(slices: Sequence[tuple[int, int, State]], n_elems: int) -> State:
    """Join (begin, end, state) of a key's slices, in any order, into its whole state; empty slices are ignored.

    Raises ValueError if slices are missing, overlap, or have different entries or numbers (of "t" the largest counts).
    """
    ordered = sorted((one for one in slices if one[0] < one[1]), key=lambda one: one[0]) or list(slices[:1])
    bounds = [0, *(end for _, end, _ in ordered)]
    if not ordered or bounds[:-1] != [begin for begin, _, _ in ordered] or bounds[-1] != n_elems:
        cut = ", ".join(f"[{begin}, {end})" for begin, end, _ in ordered)
        raise ValueError(f"slices {cut or 'of no elements'} do not cover a key of {n_elems} elements")
    first = ordered[0][2]
    if len(ordered) == 1:
        return dict(first)
    for _, _, state in ordered[1:]:
        if set(state) != set(first):
            raise ValueError(f"slices of a state have different entries: {sorted(first)} and {sorted(state)}")
    return {name: _join(name, ordered) for name in first}


def _join(name: str, slices: Sequence[tuple[int, int, State]]) -> Any:
    values = [state[name] for _, _, state in slices]
    if name == "t":
        return max(values)
    if not any(isinstance(value, np.ndarray) for value in values):
        # NaN, which equals nothing, agrees with NaN.
        if all(value == values[0] or (value != value and values[0] != values[0]) for value in values):  # noqa: PLR0124
            return values[0]
        raise ValueError(f"slices of a state have different {shown(name)}: {', '.join(str(value) for value in values)}")
    for (begin, end, _), value in zip(slices, values, strict=True):
        if not isinstance(value, np.ndarray) or value.shape != (end - begin,) or value.dtype != values[0].dtype:
            what = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else repr(value)
            raise ValueError(
                f"{shown(name)} in the slice [{begin}, {end}) of a state is {what}, not one value per element"
            )
    return np.concatenate(values)


def slice_rows(info: KeyInfo, state: State, begin: int, end: int) -> StateRecord:
    """Return the record of the rows [begin, end), from the state of the whole key."""
    columns = _columns(info)
    inside = (state[ROWS] >= begin) & (state[ROWS] < end)
    cut = {
        name: value.reshape(inside.size, -1 if name == ROWS else columns)[inside].reshape(-1)
        if isinstance(value, np.ndarray) and inside.size
        else value
        for name, value in state.items()
    }
    return record_of(info, begin * columns, end * columns, cut)


def join_rows(info: KeyInfo, records: Sequence[StateRecord]) -> StateRecord:
    """Join the records of a key, in any order; numbers are taken from the record with the most updates."""
    ordered = sorted(records, key=lambda record: record.begin)
    state = dict(max(ordered, key=lambda record: record.state["t"]).state)
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            # An array may be missing if an owner has made no update since a hyperparameter was changed.
            if not all(name in record.state for record in ordered):
                raise ValueError(f"slices of the state of key {info.key!r} have different entries")
            state[name] = np.concatenate([record.state[name] for record in ordered])
    return record_of(info, 0, info.n_elems, state)


def check_rows(optimizer: Optimizer, info: KeyInfo, state: State) -> None:
    """Raise ValueError if a state, for example from a file, cannot be of rows of this key by this optimizer."""
    ids = state.get(ROWS)
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError("its states are those of a dense key, and the key is row-sparse here")
    if ids.size and (ids[0] < 0 or ids[-1] >= info.shape[0] or not (ids[1:] > ids[:-1]).all()):
        raise ValueError(f"its states are of rows that no array of shape {info.shape} has")
    weight = np.zeros(ids.size * _columns(info), info.dtype)
    optimizer.check_state(weight, {name: value for name, value in state.items() if name != ROWS})


def _columns(info: KeyInfo) -> int:
    return info.n_elems // info.shape[0] if info.shape[0] else 0
