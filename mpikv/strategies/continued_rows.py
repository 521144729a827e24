"""The row-sparse keys of a store that goes on after deaths: each worker has all rows that exist, and all their states.

As with dense keys (continued.py) the present generation only adds. Its owners have no optimizer, so what they hold is
the sum of the last round, and just the rows that some worker has pushed in it. Every worker asks for these as soon as
it has pushed its own, and updates its table with them.

Cost: a pull of a round's rows for each push.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.arrays.reductions import SUM
from mpikv.arrays.row_ids import Ids
from mpikv.arrays.row_sparse import RowSparse
from mpikv.observe.stall import Waiting
from mpikv.optimizers.owner import AttributesId, Owner
from mpikv.optimizers.row_table import RowTable
from mpikv.optimizers.step import State
from mpikv.placement.keys import Key, KeyInfo
from mpikv.session.base import NewKey, Pending
from mpikv.session.generation import Generation
from mpikv.strategies.base import Entry
from mpikv.strategies.local import LocalRows

if TYPE_CHECKING:
    from mpikv.strategies.kept_rounds import KeptRounds


class _RowSink(NamedTuple):
    """Where rows of a table go. In place of a `Sink`."""

    ids: Ids
    values: HostArray

    def deliver(self, table: RowTable) -> None:
        self.values[...] = table.rows(self.ids)


class _All:
    """A request: all of several, and then a function."""

    def __init__(self, pending: Sequence[Pending], then: Callable[[], None]) -> None:
        self._pending, self._then = pending, then

    def test(self) -> bool:
        done = all(one.request.test() for one in self._pending)
        if done:
            self._then()
        return done


def all_of(info: KeyInfo, pending: Sequence[Pending], then: Callable[[], None] = lambda: None) -> Pending:
    """One transfer in place of several of a key. then: called when they are done."""
    waiting = pending[0].waiting if pending else Waiting("pull", info.key, info.id)
    return Pending(_All(pending, then), waiting, [one.waiting for one in pending[1:]])


def rows_of(now: Generation, key: Key) -> tuple[Pending, Callable[[], RowSparse]]:
    """Ask the owners of a generation for the rows that they hold of a key: the first ones, or the sum of a round."""
    info = now.session.infos[key]
    pending, finish = now.strategy.rows.there(info)
    return all_of(info, pending), finish


def added(now: Generation, key: Key, total: RowSparse, priority: int) -> tuple[Pending, Callable[[], RowSparse]]:
    """Let the owners of a generation add what this worker brings to a round, and ask them for the sum."""
    brought = RowSparse(total.indices, total.values.copy(), total.shape)
    now.strategy.rows.push(now.session.infos[key], brought, priority)
    return rows_of(now, key)


class ContinuedRows(LocalRows):
    def __init__(self, strategy: KeptRounds, owner: Owner) -> None:
        super().__init__(owner)
        self._strategy = strategy

    def push(self, info: KeyInfo, total: RowSparse, priority: int) -> None:
        self._strategy.start([Entry(info, total, None)], SUM, priority, waits=False)

    def pull(self, info: KeyInfo, ids: Ids, priority: int, call: str) -> tuple[HostArray, list[Pending]]:
        values: HostArray = np.empty((ids.size, info.n_elems // max(info.shape[0], 1)), info.dtype)
        sink: Any = _RowSink(ids, values)
        return values, self._strategy.start([Entry(info, None, sink)], SUM, priority, waits=False)

    def changed(self, info: KeyInfo, priority: int) -> tuple[list[Pending], Callable[[], RowSparse]]:
        _, pending = self.pull(info, np.empty(0, np.int64), priority, "pull")

        def finish() -> RowSparse:
            return LocalRows.changed(self, info, priority)[1]()

        return pending, finish

    def update(self, info: KeyInfo, total: RowSparse, number: AttributesId) -> None:
        """Update the table with the sum of a round."""
        table = self.tables[info.id]
        rows = total.values.reshape(total.indices.size, table.columns).astype(sum_dtype(info.dtype))
        table.update(self._owner, total.indices, rows, number)

    def given(self, info: KeyInfo, early: NewKey | None) -> tuple[list[HostArray], State | None]:
        """What another survivor gets that lacks it: ids and rows, and states. early: the key has only this value."""
        table = self.tables[info.id]
        states = table.states(self._owner)
        value = [table.ids(), table.rows(table.ids())] if early is None else [early.value.indices, early.value.values]
        return value, None if states is None else states.state

    def take(self, info: KeyInfo, value: Sequence[HostArray], state: State | None) -> None:
        """Take the value of a round from another rank: ids and rows."""
        table = self.tables[info.id]
        table.take(*value)
        table.set_states(self._owner, state)
