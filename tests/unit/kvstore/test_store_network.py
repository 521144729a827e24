"""The stores on a network that keeps no more order than MPI promises.

Messages of one sender with one tag arrive in order; whatever other senders or other tags bring may overtake them and
take its time. The thread transport alone is kinder than that.
"""

from __future__ import annotations

import numpy as np
import pytest
from store_modes import BOUND, FEW_ASYNC, FEW_DIST_SYNC, Mode, mode_id

from mpikv import optimizers
from mpikv.testing import ranks
from mpikv.transports import faulty

MODES = (*FEW_DIST_SYNC, *FEW_ASYNC, Mode("dist_sync", 4, 0, "halving_doubling"), Mode("dist_async", 3, 1))
N = 3 * BOUND


@pytest.fixture(params=range(3))
def unruly(request, monkeypatch):
    """Messages come some looks later, those of different senders and tags in any order."""
    faults = faulty.Faults(seed=request.param, most_looks=3)
    monkeypatch.setattr(ranks, "Fabric", lambda size, hosts: faulty.FaultyFabric(size, lambda rank: faults, hosts))


def full(value, n=N):
    return np.full(n, value, np.float32)


@pytest.mark.grid
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_after_a_barrier_every_push_before_it_counts(mode, unruly):
    def body(store):
        store.set_optimizer(optimizers.create("test"))
        store.init(["a", "b"], [full(0), full(0, 3)])
        found = []
        for _ in range(6):
            store.push(["a", "b"], [full(1), full(2, 3)])
            store.barrier()
            found.append([np.unique(store.pull(key)).tolist() for key in "ab"])
            store.barrier()
        return found

    W = mode.workers
    expected = [[[1.0 * W * i], [2.0 * W * i]] for i in range(1, 7)]
    assert mode.run(body) == [expected] * W


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_same_bits(workers, unruly):
    def body(store):
        numbers = np.random.default_rng(store.rank)
        store.init("w", full(0.5))
        store.set_optimizer(optimizers.create("adam", learning_rate=0.01))
        found = []
        for _ in range(5):
            value = numbers.standard_normal(N).astype(np.float32)
            store.pushpull("w", value)
            found.append(value.tobytes())
        return found

    results = [Mode("dist_sync", workers, servers, "naive").run(body) for servers in (0, 1, 2, 0)]
    for result in results:
        assert result == [results[0][0]] * workers


@pytest.mark.grid
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_optimizers_and_states_between_pushes(mode, unruly, tmp_path):
    """Nothing that is pushed before or after a collective call slips to its other side."""

    def body(store):
        store.init("w", full(0))
        expected, found = 0.0, []
        for rate in (1.0, 10.0, 100.0):
            optimizer = optimizers.create("sgd", learning_rate=rate)
            store.set_optimizer(optimizer)
            store.push("w", full(-1))
            optimizer.learning_rate = 2 * rate
            store.push("w", full(-1))
            store.save_optimizer_states(tmp_path / "states")
            expected += 3 * rate * store.num_workers
            store.barrier()
            found.append(np.unique(store.pull("w")).tolist() == [expected])
            store.barrier()
        return found

    assert mode.run(body) == [[True] * 3] * mode.workers


@pytest.mark.grid
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_another_optimizer_begins_with_the_pushes_after_it(mode, unruly):
    """Without a pull or a barrier before it."""

    def body(store):
        store.init(["a", "b"], [full(0), full(0, 2000)])
        for rate in (1, 10, 100):
            store.set_optimizer(optimizers.create("test", rescale_grad=rate))
            for _ in range(3):
                store.push(["a", "b"], [full(1), full(1, 2000)])
        store.barrier()
        return [np.unique(store.pull(key)).tolist() for key in "ab"]

    assert mode.run(body) == [[[333.0 * mode.workers]] * 2] * mode.workers
