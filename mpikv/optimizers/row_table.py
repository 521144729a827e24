"""An owner's table of rows of a row-sparse key: rows that exist, and the optimizer's states of rows that were pushed.

All other rows are zero. A table begins with some rows, or with all. Without an optimizer each sum replaces the value.
With one, an update copies the pushed rows and their states out, runs the optimizer's formula on them as on a whole
value, and copies them back (MXNet calls this a *lazy* update): rows that were not pushed keep their values and states,
without any decay. "t" counts the updates of the key. Only optimizers whose `updates_rows` is True can do this.

How a row is found: one array has the ids of all rows, sorted, and another one their positions; new rows are appended at
the end. If all rows of the shard exist, there are no such arrays.

Cost: memory for the rows that exist and up to half as much again; 16 bytes for each id, twice with an optimizer that
has states. An update copies the pushed rows and their states twice, and finds each id by a binary search; if ids are
new, all ids are copied. It sends no message and takes no lock.
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
from mpikv.optimizers.states import ROWS, StateRecord, record_of
from mpikv.optimizers.step import State
from mpikv.placement.keys import KeyInfo


class Positions:
    """The ids of rows, sorted, and the position of each row in an array."""

    def __init__(self, ids: Ids) -> None:
        self._ids, self._at = ids, np.arange(ids.size)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return int(self._ids.size)

    @property
    def nbytes(self) -> int:
        """The memory of the ids and positions."""
        return self._ids.nbytes + self._at.nbytes

    def in_order(self) -> tuple[Ids, HostArray]:
        """Return all ids, sorted, and their positions."""
        return self._ids, self._at

    def find(self, ids: Ids) -> HostArray:
        """Return the positions of these ids, -1 for unknown ones."""
        if not self.count:
            return np.full(ids.size, -1)
        near = np.minimum(np.searchsorted(self._ids, ids), self.count - 1)
        found: HostArray = np.where(self._ids[near] == ids, self._at[near], -1)
        return found

    def add(self, ids: Ids) -> tuple[HostArray, HostArray]:
        """Return the positions of these sorted ids, and the indices of the new ones, whose positions come last."""
        positions = self.find(ids)
        new = np.flatnonzero(positions < 0)
        if new.size:
            positions[new] = np.arange(self.count, self.count + new.size)
            before = np.searchsorted(self._ids, ids[new])
            self._at = np.insert(self._at, before, positions[new])
            self._ids = np.insert(self._ids, before, ids[new])
        return positions, new


def _grown(array: HostArray, n_rows: int) -> HostArray:
    """Return the array, or a longer one that begins with its rows."""
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
        self._optimizer: Optimizer | None = None  # the one that made the states
        self._updates = 0
        self._watchers: dict[int, int] = {}  # by watcher: the number of updates at its last call of `changed`
        self._changed: deque[tuple[int, Ids]] = deque()  # an update's number, and the rows that it changed
        self._forget_states()
        self.replace(np.empty(0, np.int64), np.empty((0, self.columns), info.dtype))

    def replace(self, ids: Ids, rows: HostArray) -> None:
        """Replace the value by these rows. ids: sorted, each once. The table keeps both arrays."""
        self._positions = None if ids.size == self.end - self.begin else Positions(ids)
        self._values = rows

    def rows(self, ids: Ids) -> HostArray:
        """Return a copy of these rows, in the order of `ids`."""
        if self._positions is None:
            return self._values[ids - self.begin]
        positions = self._positions.find(ids)
        found = np.zeros((ids.size, self.columns), self.info.dtype)
        exists = positions >= 0
        found[exists] = self._values[positions[exists]]
        return found

    def _put(self, ids: Ids, rows: HostArray) -> None:
        if self._positions is None:
            self._values[ids - self.begin] = rows
            return
        positions, _ = self._positions.add(ids)
        self._values = _grown(self._values, self._positions.count)
        self._values[positions] = rows

    def ids(self) -> Ids:
        """Return the ids of the rows that exist, sorted."""
        return np.arange(self.begin, self.end) if self._positions is None else self._positions.in_order()[0]

    def take(self, ids: Ids, rows: HostArray) -> None:
        """Replace the value by another rank's of a later round."""
        self._note_changed(np.union1d(ids, self.ids()))
        self.replace(ids.copy(), rows.reshape(ids.size, self.columns).copy())

    @property
    def n_rows(self) -> int:
        """How many rows exist."""
        return self.end - self.begin if self._positions is None else self._positions.count

    @property
    def held_bytes(self) -> int:
        """The memory of the rows, states, ids and positions."""
        arrays = [self._values, *self._states.values()]
        positions = [one for one in (self._positions, self._touched) if one is not None]
        return sum(array.nbytes for array in arrays) + sum(one.nbytes for one in positions)

    def update(self, owner: Owner, ids: Ids, total: HostArray, attributes: AttributesId) -> None:
        """Apply the sum of the pushed rows in one round, in the dtype that the key is added in; see `Owner.apply`.

        The table may keep or change the arrays. Raises what the optimizer raises.
        """
        self._match_optimizer(owner)
        self._note_changed(ids)
        optimizer = self._optimizer
        if optimizer is None:
            self.replace(ids, total.astype(self.info.dtype, copy=False))
            return
        weight = self.rows(ids)
        flat = weight.reshape(-1)
        positions, new = self._touched.add(ids)
        before = self._state_of_rows(optimizer, weight, positions, new)
        state = owner.update(self.info, flat, (total.reshape(-1),), attributes, before)
        assert state is not None
        self._put_state(optimizer, state, positions)
        self._put(ids, weight)

    def _note_changed(self, ids: Ids) -> None:
        """Note which rows an update changes, if there are watchers."""
        self._updates += 1
        if self._watchers:
            if self._optimizer is None:  # all other rows become zero
                ids = np.union1d(ids, self.ids())
            self._changed.append((self._updates, ids))

    def changed(self, watcher: int) -> Ids:
        """Return the rows that were changed since the last call by this watcher, a number; none at its first call.

        Changes are noted from the first call on, and forgotten once all watchers have called again.
        """
        since = self._watchers.get(watcher, self._updates)
        self._watchers[watcher] = self._updates
        found = [ids for update, ids in self._changed if update > since]
        while self._changed and self._changed[0][0] <= min(self._watchers.values()):
            self._changed.popleft()
        return functools.reduce(np.union1d, found, np.empty(0, np.int64))

    def _match_optimizer(self, owner: Owner) -> None:
        """Forget the states if the key has another optimizer now."""
        optimizer = owner.optimizer_of(self.info.id)
        if optimizer is not self._optimizer:
            self._optimizer = optimizer
            self._forget_states()

    def _forget_states(self) -> None:
        self._touched = Positions(np.empty(0, np.int64))
        self._numbers: State | None = None  # the numbers of the state; None before the first update
        self._states: dict[str, HostArray] = {}  # the arrays of the state, indexed by the rows' positions

    def _state_of_rows(
        self, optimizer: Optimizer, weight: HostArray, positions: HostArray, new: HostArray
    ) -> State | None:
        """Return the state of these rows, as of one value; rows that were never pushed get their first state."""
        if self._numbers is None:
            return None
        first = optimizer.init(weight[new].reshape(-1))
        state = dict(self._numbers)
        for name, array in self._states.items():
            array = self._states[name] = _grown(array, self._touched.count)  # noqa: PLW2901
            array[positions[new]] = first[name].reshape(new.size, self.columns) if name in first else 0
            state[name] = array[positions].reshape(-1)
        return state

    def _put_state(self, optimizer: Optimizer, state: State, positions: HostArray) -> None:
        """Copy the new state of these rows back. Changed hyperparameters may have added or removed arrays."""
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        self._numbers = {name: value for name, value in state.items() if name not in arrays}
        self._states = {name: array for name, array in self._states.items() if name in arrays}
        for name, value in arrays.items():
            if name not in self._states:
                self._states[name] = self._first_states(optimizer, name, value.dtype)
            self._states[name][positions] = value.reshape(positions.size, self.columns)

    def _first_states(self, optimizer: Optimizer, name: str, dtype: np.dtype[Any]) -> HostArray:
        """Return a new array of the state for all rows that were pushed before the state had it."""
        ids, positions = self._touched.in_order()
        made: HostArray = np.empty((ids.size, self.columns), dtype)
        made[positions] = optimizer.init(self.rows(ids).reshape(-1))[name].reshape(ids.size, self.columns)
        return made

    def states(self, owner: Owner) -> StateRecord | None:
        """Return the states of all rows that have one; None before the optimizer's first update."""
        self._match_optimizer(owner)
        if self._numbers is None:
            return None
        ids, positions = self._touched.in_order()
        state = {**self._numbers, ROWS: ids}
        state |= {name: array[positions].reshape(-1) for name, array in self._states.items()}
        return record_of(self.info, self.begin * self.columns, self.end * self.columns, state)

    def set_states(self, owner: Owner, state: State | None) -> None:
        """Set the states of rows of this table, for example from a file; None: no row has one."""
        self._match_optimizer(owner)
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
