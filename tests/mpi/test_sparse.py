"""Row-sparse keys between processes: MXNet's arithmetic in each kind of store, beside a dense key."""

from __future__ import annotations

import numpy as np
import pytest
from mpi_stores import full, modes, on_workers

from mpikv import RowSparse, optimizers

SHAPE = (1211, 300)


def weight(workers, row, rounds):
    return 1 + sum((r + 1) * 2 * rounds for r in range(workers) if r % 2 == row)


@pytest.mark.mpi
def test_mxnets_arithmetic(comm):
    for name, servers in modes(comm):

        def body(store):
            store.set_optimizer(optimizers.create("test", rescale_grad=2))
            store.init(["rows", "dense"], [RowSparse.of(full(1, *SHAPE)), full(0, 5)])
            found = []
            for _ in range(3):
                mine = RowSparse([store.rank % 2], full(store.rank + 1, 1, SHAPE[1]), SHAPE)
                store.push(["rows", "dense"], [mine, full(1, 5)])
                store.barrier()
                rows = store.row_sparse_pull("rows", row_ids=[1210, 1, 0, 1])
                found.append([np.unique(row).tolist() for row in rows.values])
                store.barrier()
            store.push("rows", full(1, *SHAPE))  # 1.4 MB, all rows
            store.barrier()
            whole = store.pull("rows", ignore_sparse=False)
            return found, np.unique(whole[2:]).tolist()

        workers = comm.Get_size() - servers
        rounds = [[[weight(workers, p, i)] for p in (0, 1)] + [[1]] for i in (1, 2, 3)]
        assert on_workers(comm, name, body, num_servers=servers) == [(rounds, [1 + 2 * workers])] * workers
