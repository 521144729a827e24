"""Row-sparse parameters of a Trainer: their gradients go to the store by rows, and changed rows come back.

The weight is a dense array on every worker, as models read it. Of the store's rows a worker fetches those that were
changed since it last asked, by whichever worker: as many as all workers' gradients have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.row_sparse import RowSparse
from mpikv.common.checks import shown
from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.optimizers import Optimizer
from mpikv.trainer.parameter import list_data


def sparse_names(
    params: Mapping[str, Any], trained: Sequence[str], store: KVStore | None, optimizer: Optimizer, *, on_store: bool
) -> list[str]:
    """Return the names of the trained parameters that are row-sparse. UnsupportedError where they cannot be."""
    names = [name for name in trained if getattr(params[name], "sparse", False)]
    for name in names:
        why = ""
        if store is None or not on_store:
            why = "needs a store that makes the updates: kvstore=kv.create('local'), say, without "
            why += "update_on_kvstore=False and clip_global_norm"
        elif not optimizer.updates_rows:
            why = f"{optimizer.name} cannot update some rows alone"
        elif not all(isinstance(replica, np.ndarray) for replica in list_data(params[name])):
            why = "its weight has to be in host memory"
        if why:
            raise UnsupportedError(f"parameter {shown(name)} is row-sparse: {why}")
    return names


def start(store: KVStore, key: str, parameter: Any) -> None:
    """Give the store worker 0's weight, and bring it into all replicas. Collective, blocks."""
    replicas = list_data(parameter)
    store.init(key, RowSparse.of(replicas[0]))
    ChangedRows(store, key, parameter, 0).wait()  # from now on the owners note which rows change
    store.pull(key, replicas, ignore_sparse=False)


class ChangedRows:
    """The changed rows that are being pulled into a weight. They are waited for as a `Request` is."""

    def __init__(self, store: KVStore, key: str, parameter: Any, priority: int) -> None:
        self._session, self._parameter = store.session, parameter
        self._pending, self._finish = store.strategy.changed_rows(store.session.infos[key], priority)

    def wait(self) -> None:
        """Block until they are there, and write them into all replicas."""
        for pending in self._pending:
            self._session.wait(pending)
        changed = self._finish()
        for replica in list_data(self._parameter):
            replica[changed.indices] = changed.values
