"""The strategy of stores with one process: sums and updates are made in the call itself. Needs no MPI.

It is also the reference that every other mode is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.arrays.row_ids import Ids
from mpikv.arrays.row_sparse import RowSparse
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import AS_SET, Owner
from mpikv.optimizers.row_table import RowTable
from mpikv.optimizers.states import StateRecord
from mpikv.placement.keys import Key, KeyInfo
from mpikv.session.base import NewKey, Pending, Session
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.base import Entry, Loaded, PreparedCall, Read, Sink, Strategy
from mpikv.strategies.states import collect, distribute, restored


class LocalCall(PreparedCall):
    def __init__(self, strategy: LocalStrategy, entries: Sequence[Entry]) -> None:
        self._strategy, self._entries = strategy, entries

    def start(self, priority: int = 0) -> list[Pending]:
        for entry in self._entries:
            if entry.total is not None:
                self._strategy.push(entry.info, entry.total)
            if entry.sink is not None:
                self._strategy.pull(entry.info, entry.sink)
        return []

    def wait(self, pending: Sequence[Pending]) -> None:
        """Return at once: `start` has done everything."""

    def release(self) -> None:
        self.valid, self._entries = False, ()


class LocalRows:
    """See `SparseKeys`. tables: of the row-sparse keys, by their numbers."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.tables: dict[int, RowTable] = {}

    def push(self, info: KeyInfo, total: RowSparse, priority: int) -> None:
        table = self.tables[info.id]
        rows = total.values.reshape(total.indices.size, table.columns).astype(sum_dtype(info.dtype), copy=False)
        table.update(self._owner, total.indices, rows, AS_SET)

    def pull(self, info: KeyInfo, ids: Ids, priority: int, call: str) -> tuple[HostArray, list[Pending]]:
        return self.tables[info.id].rows(ids), []

    def changed(self, info: KeyInfo, priority: int) -> tuple[list[Pending], Callable[[], RowSparse]]:
        table = self.tables[info.id]
        ids = table.changed(0)
        changed = RowSparse(ids, table.rows(ids).reshape(ids.size, *info.shape[1:]), info.shape)
        return [], lambda: changed


class LocalStrategy(Strategy):
    lends = False  # an updater may keep what it is given, and change it

    def __init__(self, session: Session) -> None:
        self._session, self._infos = session, session.infos
        self._stored: dict[int, SpaceArray] = {}
        self._owner = Owner(session.spaces, own=False)
        self.rows = LocalRows(self._owner)
        self._tables = self.rows.tables

    def init(self, values: Sequence[NewKey]) -> None:
        for key, shape, value, space, sparse in values:
            info = KeyInfo(key, len(self._infos), shape, value.dtype, space=space, sparse=sparse)
            self._infos[key] = info
            self._session.any_sparse |= sparse
            if isinstance(value, RowSparse):
                table = self._tables[info.id] = RowTable(info, 0, shape[0])
                table.replace(value.indices, value.values.reshape(value.indices.size, table.columns))
            else:
                self._stored[info.id] = value

    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        """See `LocalCall`. `op` has no effect here: with one worker every reduction returns that worker's array."""
        return LocalCall(self, entries)

    def pull(self, info: KeyInfo, sink: Sink) -> None:
        sink.deliver(self._stored[info.id])

    def push(self, info: KeyInfo, total: SpaceArray) -> None:
        stored, space = self._stored[info.id], self._session.spaces.of(info)
        if self._session.updater is not None:
            space.wait_for_callers(total, stored)
            with space.in_stream():
                self._session.updater(info.key, total.reshape(info.shape), stored.reshape(info.shape))
        else:
            total = space.cast(total, sum_dtype(info.dtype))
            space.wait_for_callers(total, stored)
            with space.in_stream():
                self._owner.apply(info, stored, total, AS_SET)

    def stats(self) -> dict[str, int]:
        return {"row_bytes": sum(table.held_bytes for table in self._tables.values())} if self._tables else {}

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        """Use the user's own object, so that attributes which the user changes later take effect without a message."""
        slot, key_ids = self._session.serve(optimizer, keys)
        self._owner.set_optimizer(slot, optimizer, key_ids)

    def _all(self) -> list[tuple[KeyInfo, int, int]]:
        return [(info, 0, info.n_elems) for info in self._infos.values()]

    def own_states(self, call: str, *, alone: bool = False) -> list[StateRecord]:
        rows = [table.states(self._owner) for table in self._tables.values()]
        return [*collect(self._owner, self._all()), *(part for part in rows if part is not None)]

    def load_states(self, read: Read) -> Loaded:
        """Read and check the file first, and only then change the states."""
        file = read()
        loaded = restored(file)
        for info in (self._infos[key] for key in loaded[0]):
            if info.sparse:
                self._tables[info.id].set_states(self._owner, None)
            self._owner.states.pop(info.id, None)
        for part in distribute(file, self._all()):
            info = self._infos[part.key]
            if info.sparse:
                self._tables[info.id].set_states(self._owner, part.state)
            else:
                self._owner.set_state(info, part.state)
        return loaded

    def close(self) -> None:
        self._session.spaces.close()
