"""Row-sparse parameters of a Trainer: a worker pushes the rows of their gradients, and pulls the changed rows.

The weight is a dense array on every worker, as models read it. A worker pulls the rows that any worker's push has
changed since its last pull.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mpikv.arrays.row_sparse import RowSparse
from mpikv.common.checks import shown
from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.optimizers import Optimizer
from mpikv.placement.keys import Key
from mpikv.trainer.parameter import list_data


def sparse_names(
    params: Mapping[str, Any], trained: Iterable[str], updater: KVStore | None, optimizer: Optimizer
) -> list[str]:
    """Return the names of the trained row-sparse parameters. updater: the store, if it makes the updates.

    Raises ValueError, as gluon does, where the store makes no updates; UnsupportedError if one cannot be row-sparse.
    """
    names = [name for name in trained if getattr(params[name], "sparse", False)]
    for name in names:
        if updater is None:
            raise ValueError(
                f"parameter {shown(name)} is row-sparse: needs a store that makes the updates: "
                "kvstore=kv.create('local'), say, without update_on_kvstore=False and clip_global_norm"
            )
        why = ""
        if not optimizer.updates_rows:
            why = f"{optimizer.name} cannot update some rows alone"
        elif not all(isinstance(replica, np.ndarray) for replica in list_data(params[name])):
            why = "its weight has to be in host memory"
        if why:
            raise UnsupportedError(f"parameter {shown(name)} is row-sparse: {why}")
    return names


def start(store: KVStore, key: Key, parameter: Any) -> None:
    """Initialise the store's key with worker 0's weight, and pull it into all replicas. Collective, blocks."""
    replicas = list_data(parameter)
    store.init(key, RowSparse.of(replicas[0]))
    ChangedRows(store, key, parameter, 0).wait()  # after this first call the owners note which rows change
    store.pull(key, replicas, ignore_sparse=False)


class ChangedRows:
    """A pull of the changed rows into a weight, which is waited for like a `Request`."""

    def __init__(self, store: KVStore, key: Key, parameter: Any, priority: int) -> None:
        self._session, self._parameter = store.session, parameter
        self._pending, self._finish = store.strategy.rows.changed(store.session.infos[key], priority)

    def wait(self) -> None:
        """Block until the rows have arrived, and write them into all replicas."""
        for pending in self._pending:
            self._session.wait(pending)
        changed = self._finish()
        for replica in list_data(self._parameter):
            replica[changed.indices] = changed.values
