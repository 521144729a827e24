"""Every exchange between workers, forced by name, between processes."""

from __future__ import annotations

import numpy as np
import pytest
from mpi_stores import full, on_workers, uniform
from store_checks import reductions
from store_modes import Mode

from mpikv import ConfigError, optimizers
from mpikv.testing.paths import DTYPES, check_path

ALGORITHMS = ("ring", "owners", "native")  # what is chosen by itself: test_store.py
FORCED = pytest.mark.parametrize("algorithm", ALGORITHMS)


@pytest.mark.mpi
@FORCED
def test_values(comm, algorithm):
    dtypes = DTYPES[ALGORITHMS.index(algorithm) % 2 :: 2]
    check_path(lambda body: on_workers(comm, "dist_sync", body, algorithm=algorithm), comm.Get_size(), dtypes=dtypes)


@pytest.mark.mpi
@FORCED
def test_reductions(comm, algorithm):
    mode = Mode("dist_sync", comm.Get_size())
    on_workers(comm, "dist_sync", lambda store: reductions(store, mode), algorithm=algorithm)


@pytest.mark.mpi
@FORCED
def test_orders_and_optimizers(comm, algorithm):
    """Keys initialised in orders of the workers' own; state once over all workers; a change to one of whole keys."""
    keys = [str(key) for key in range(6)]

    def body(store):
        W = store.num_workers
        store.set_optimizer(optimizers.create("test"))
        for key in np.random.default_rng(store.rank).permutation(keys).tolist():
            store.init(key, full(int(key) if store.rank == 0 else -1, 2000))
            store.push(key, full(1, 2000))
        assert [uniform(store.pull(key)) for key in keys] == [float(i + W) for i in range(6)]
        store.init(["a", "b"], [full(0, 1001), full(1, 3)])
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0, momentum=0.5))
        for _ in range(2):
            store.push(["a", "b"], [full(1, 1001), full(1, 3)])
        assert [uniform(store.pull(key)) for key in "ab"] == [-2.5 * W, 1 - 2.5 * W]
        store.set_optimizer(optimizers.create("lamb", learning_rate=0.5))
        store.push(["a", "b"], [full(1, 1001), full(1, 3)])
        moved = [uniform(store.pull(key)) for key in "ab"]
        assert moved[0] < -2.5 * W
        assert moved[1] < 1 - 2.5 * W
        return moved

    results = on_workers(comm, "dist_sync", body, algorithm=algorithm)
    assert results == [results[0]] * comm.Get_size()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("n_hosts", [2, 4])
def test_pretended_hosts(comm, n_hosts):
    """`auto` goes by the hosts; with fewer ranks than hosts every rank says so."""
    W = comm.Get_size()
    if n_hosts > W:
        with pytest.raises(ConfigError, match=f"MPIKV_TEST_HOSTS={n_hosts}, but there are only {W} ranks"):
            on_workers(comm, "dist_sync", lambda store: None, test_hosts=n_hosts)
        return
    check_path(lambda body: on_workers(comm, "dist_sync", body, test_hosts=n_hosts), W, dtypes=DTYPES[::3])
