"""One process, several devices: the sum and the update happen here and at once. Needs no MPI.

Also the reference that every other mode is compared with.
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
from mpikv.placement.keys import Key, KeyInfo
from mpikv.session.base import NewKey, Pending, Session
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.base import Entry, Loaded, Read, Strategy, Write
from mpikv.strategies.states import collect, distribute, restored


class LocalStrategy(Strategy):
    """The strategy of `local` and `device`."""

    def __init__(self, session: Session) -> None:
        self._session, self._infos = session, session.infos
        self._stored: dict[int, SpaceArray] = {}
        self._tables: dict[int, RowTable] = {}
        self._owner = Owner(session.spaces, own=False)

    def init(self, values: Sequence[NewKey]) -> None:
        """Store the values."""
        for key, shape, value, space, sparse in values:
            info = KeyInfo(key, len(self._infos), shape, value.dtype, space=space, sparse=sparse)
            self._infos[key] = info
            self._session.any_sparse |= sparse
            if isinstance(value, RowSparse):
                table = self._tables[info.id] = RowTable(info, 0, shape[0])
                table.replace(value.indices, value.values.reshape(value.indices.size, table.columns))
            else:
                self._stored[info.id] = value

    def exchange(self, entries: Sequence[Entry], priority: int, op: Reduction = SUM) -> list[Pending]:
        """Update the stored values now, and copy them out. Every reduction is what one worker makes of its devices."""
        for info, total, sink in entries:
            if total is not None:
                self.push(info, total)
            if sink is not None:
                sink.deliver(self._stored[info.id])
        return []

    def push(self, info: KeyInfo, total: SpaceArray) -> None:
        """Update the stored value now."""
        stored, space = self._stored[info.id], self._session.spaces.of(info)
        if self._session.updater is not None:
            space.follow(total, stored)
            with space.here():
                self._session.updater(info.key, total.reshape(info.shape), stored.reshape(info.shape))
        else:
            total = space.cast(total, sum_dtype(info.dtype))
            space.follow(total, stored)
            with space.here():
                self._owner.apply(info, stored, total, AS_SET)

    def push_rows(self, info: KeyInfo, total: RowSparse, priority: int) -> None:
        """Update the pushed rows now."""
        table = self._tables[info.id]
        rows = total.values.reshape(total.indices.size, table.columns).astype(sum_dtype(info.dtype), copy=False)
        table.update(self._owner, total.indices, rows, AS_SET)

    def pull_rows(self, info: KeyInfo, ids: Ids, priority: int, call: str) -> tuple[HostArray, list[Pending]]:
        """Copy the rows out."""
        return self._tables[info.id].rows(ids), []

    def changed_rows(self, info: KeyInfo, priority: int) -> tuple[list[Pending], Callable[[], RowSparse]]:
        """Those of now."""
        table = self._tables[info.id]
        ids = table.changed(0)
        changed = RowSparse(ids, table.rows(ids).reshape(ids.size, *info.shape[1:]), info.shape)
        return [], lambda: changed

    def stats(self) -> dict[str, int]:
        """The memory of row-sparse keys, where there are some."""
        return {"row_bytes": sum(table.held_bytes for table in self._tables.values())} if self._tables else {}

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        """Use the user's own object, so that a changed attribute has effect without being sent."""
        slot, key_ids = self._session.serve(optimizer, keys)
        self._owner.set_optimizer(slot, optimizer, key_ids)

    def _all(self) -> list[tuple[KeyInfo, int, int]]:
        return [(info, 0, info.n_elems) for info in self._infos.values()]

    def save_states(self, write: Write) -> None:
        """Write the states of this process, the only owner."""
        rows = [table.states(self._owner) for table in self._tables.values()]
        write([[*collect(self._owner, self._all()), *(part for part in rows if part is not None)]])

    def load_states(self, read: Read) -> Loaded:
        """Read and check the file first, and only then change the states."""
        file = read()
        loaded = restored(file)
        for info in (self._infos[key] for key in loaded[0]):
            if info.sparse:
                self._tables[info.id].take_states(self._owner, None)
            self._owner.states.pop(info.id, None)
        for part in distribute(file, self._all()):
            info = self._infos[part.key]
            if info.sparse:
                self._tables[info.id].take_states(self._owner, part.state)
            else:
                self._owner.take_state(info, part.state)
        return loaded

    def close(self) -> None:
        """Give back the device's memory; nothing else is to end."""
        self._session.spaces.close()
