"""Rows of a key as their owner holds them: those that exist, and the optimizer's states of those that were pushed.

All other rows are zero. A table begins with some rows, or with all. Without an optimizer the value becomes each sum,
and rows that are not in it are zero again. With one, an update takes the pushed rows and their states out, runs the
optimizer's formula on them as it would on a whole value, and puts them back (*lazy* updates, as MXNet calls them): rows
that were not pushed keep their values and their states, and nothing decays them. "t" counts the updates of the key, not
those of a row. Only optimizers whose `updates_rows` is True can do that.

Where a row lies: the ids are sorted in an array, their positions beside them; new rows come at the end. Where all rows
of the part exist, that is left out.

Cost: memory for the rows that exist and up to half as much again; 16 bytes for each id, twice with an optimizer that
has states. An update copies the pushed rows and their states out and in, and looks each id up among all by halving;
where ids are new, all ids are copied. It sends no message and takes no lock.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.row_ids import Ids
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import AttributesId, Owner
from mpikv.optimizers.states import ROWS, Part, part_of
from mpikv.optimizers.step import State
from mpikv.placement.keys import KeyInfo


class Positions:
    """The positions of rows in arrays: the rows' ids, sorted, and the position of each."""

    def __init__(self, ids: Ids) -> None:
        self._ids, self._at = ids, np.arange(ids.size)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return int(self._ids.size)

    @property
    def nbytes(self) -> int:
        """The memory of this."""
        return self._ids.nbytes + self._at.nbytes

    def in_order(self) -> tuple[Ids, HostArray]:
        """All ids, sorted, and their positions."""
        return self._ids, self._at

    def find(self, ids: Ids) -> HostArray:
        """The positions of these, -1 for those that are not there."""
        if not self.count:
            return np.full(ids.size, -1)
        near = np.minimum(np.searchsorted(self._ids, ids), self.count - 1)
        found: HostArray = np.where(self._ids[near] == ids, self._at[near], -1)
        return found

    def add(self, ids: Ids) -> tuple[HostArray, HostArray]:
        """The positions of these, which are sorted, and which of them are new; those come behind all others."""
        positions = self.find(ids)
        new = np.flatnonzero(positions < 0)
        if new.size:
            positions[new] = np.arange(self.count, self.count + new.size)
            before = np.searchsorted(self._ids, ids[new])
            self._at = np.insert(self._at, before, positions[new])
            self._ids = np.insert(self._ids, before, ids[new])
        return positions, new


def _grown(array: HostArray, n_rows: int) -> HostArray:
    """The array, or a longer one that begins with its rows."""
    if len(array) >= n_rows:
        return array
    longer: HostArray = np.empty((max(n_rows, len(array) * 3 // 2), array.shape[1]), array.dtype)
    longer[: len(array)] = array
    return longer


class RowTable:
    """The rows [begin, end) of a key. Rows are (k, columns), in the key's dtype; ids are those of the key."""

    def __init__(self, info: KeyInfo, begin: int, end: int) -> None:
        self.info, self.begin, self.end = info, begin, end
        self.columns = math.prod(info.shape[1:])
        self._optimizer: Optimizer | None = None  # whose states these are
        self._updates = 0
        self._watchers: dict[int, int] = {}  # of each, after how many updates it has asked last
        self._changed: deque[tuple[int, Ids]] = deque()  # an update's number, and the rows that it has changed
        self._forget_states()
        self.replace(np.empty(0, np.int64), np.empty((0, self.columns), info.dtype))

    # --- values

    def replace(self, ids: Ids, rows: HostArray) -> None:
        """The value becomes these rows, whose arrays become the table's; ids sorted and once each."""
        self._positions = None if ids.size == self.end - self.begin else Positions(ids)
        self._values = rows

    def rows(self, ids: Ids) -> HostArray:
        """A copy of these rows, in any order."""
        if self._positions is None:
            return self._values[ids - self.begin]
        positions = self._positions.find(ids)
        found = np.zeros((ids.size, self.columns), self.info.dtype)
        there = positions >= 0
        found[there] = self._values[positions[there]]
        return found

    def _put(self, ids: Ids, rows: HostArray) -> None:
        if self._positions is None:
            self._values[ids - self.begin] = rows
            return
        positions, _ = self._positions.add(ids)
        self._values = _grown(self._values, self._positions.count)
        self._values[positions] = rows

    @property
    def n_rows(self) -> int:
        """How many rows exist."""
        return self.end - self.begin if self._positions is None else self._positions.count

    @property
    def held_bytes(self) -> int:
        """The memory of all of it."""
        arrays = [self._values, *self._states.values()]
        positions = [one for one in (self._positions, self._touched) if one is not None]
        return sum(array.nbytes for array in arrays) + sum(one.nbytes for one in positions)

    # --- updates

    def update(self, owner: Owner, ids: Ids, total: HostArray, attributes: AttributesId) -> None:
        """One round: apply the sum of the pushed rows, in the dtype that the key is added in.

        attributes: see `Owner.apply`. The arrays are given up. Raises what the optimizer raises.
        """
        self._follow(owner)
        self._note(ids)
        optimizer = self._optimizer
        if optimizer is None:
            self.replace(ids, total.astype(self.info.dtype, copy=False))
            return
        weight = self.rows(ids)
        flat = weight.reshape(-1)
        positions, new = self._touched.add(ids)
        state = owner.update(
            self.info,
            flat,
            (total.reshape(-1),),
            attributes,
            self._taken(optimizer, weight, positions, new),
        )
        assert state is not None
        self._keep(optimizer, state, positions)
        self._put(ids, weight)

    def _note(self, ids: Ids) -> None:
        """Note which rows an update changes, where anybody will ask."""
        self._updates += 1
        if self._watchers:
            if self._optimizer is None:  # the rows that exist become zero
                ids = np.union1d(ids, self._existing())
            self._changed.append((self._updates, ids))

    def _existing(self) -> Ids:
        return np.arange(self.begin, self.end) if self._positions is None else self._positions.in_order()[0]

    def changed(self, watcher: int) -> Ids:
        """The rows that were changed since this watcher, a number, has asked last; none when it asks first.

        What changes is noted from the first question on, until all who have asked have asked again.
        """
        since = self._watchers.get(watcher, self._updates)
        self._watchers[watcher] = self._updates
        found = [ids for update, ids in self._changed if update > since]
        while self._changed and self._changed[0][0] <= min(self._watchers.values()):
            self._changed.popleft()
        return functools.reduce(np.union1d, found, np.empty(0, np.int64))

    def _follow(self, owner: Owner) -> None:
        """States start anew where another optimizer serves the key."""
        optimizer = owner.optimizer_of(self.info.id)
        if optimizer is not self._optimizer:
            self._optimizer = optimizer
            self._forget_states()

    def _forget_states(self) -> None:
        self._touched = Positions(np.empty(0, np.int64))
        self._numbers: State | None = None  # what of the state is no array; None before the first update
        self._states: dict[str, HostArray] = {}  # by the positions of the rows

    def _taken(self, optimizer: Optimizer, weight: HostArray, positions: HostArray, new: HostArray) -> State | None:
        """The state of these rows, as of one value; those that were never pushed have their first state."""
        if self._numbers is None:
            return None
        first = optimizer.init(weight[new].reshape(-1))
        state = dict(self._numbers)
        for name, array in self._states.items():
            array = self._states[name] = _grown(array, self._touched.count)  # noqa: PLW2901
            array[positions[new]] = first[name].reshape(new.size, self.columns) if name in first else 0
            state[name] = array[positions].reshape(-1)
        return state

    def _keep(self, optimizer: Optimizer, state: State, positions: HostArray) -> None:
        """Put the new state of these rows back. A change of hyperparameters adds arrays and takes them away."""
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        self._numbers = {name: value for name, value in state.items() if name not in arrays}
        self._states = {name: array for name, array in self._states.items() if name in arrays}
        for name, value in arrays.items():
            if name not in self._states:
                self._states[name] = self._first_states(optimizer, name, value.dtype)
            self._states[name][positions] = value.reshape(positions.size, self.columns)

    def _first_states(self, optimizer: Optimizer, name: str, dtype: np.dtype[Any]) -> HostArray:
        """The array of this name for all rows that were pushed before it was wanted."""
        ids, positions = self._touched.in_order()
        made: HostArray = np.empty((ids.size, self.columns), dtype)
        made[positions] = optimizer.init(self.rows(ids).reshape(-1))[name].reshape(ids.size, self.columns)
        return made

    # --- states

    def states(self, owner: Owner) -> Part | None:
        """The states of the rows that have some; None where the optimizer was not used yet."""
        self._follow(owner)
        if self._numbers is None:
            return None
        ids, positions = self._touched.in_order()
        state = {**self._numbers, ROWS: ids}
        state |= {name: array[positions].reshape(-1) for name, array in self._states.items()}
        return part_of(self.info, self.begin * self.columns, self.end * self.columns, state)

    def take_states(self, owner: Owner, state: State | None) -> None:
        """Go on with these states of rows of this table, or with none."""
        self._follow(owner)
        self._forget_states()
        if state is None:
            return
        self._touched = Positions(state[ROWS])
        self._states = {
            name: value.reshape(state[ROWS].size, self.columns).copy()
            for name, value in state.items()
            if name != ROWS and isinstance(value, np.ndarray)
        }
        self._numbers = {name: value for name, value in state.items() if not isinstance(value, np.ndarray)}
