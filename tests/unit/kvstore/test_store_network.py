"""The stores on a network that keeps no more order than MPI promises.

Messages of one sender with one tag arrive in order; whatever other senders or other tags bring may overtake them and
take its time. The thread transport alone is kinder than that.
"""

from __future__ import annotations

import numpy as np
import pytest
from on_workers import on, uniform
from store_modes import BOUND, FEW_ASYNC, FEW_DIST_SYNC, Mode

from mpikv import optimizers

MODES = (*FEW_DIST_SYNC, *FEW_ASYNC, Mode("dist_sync", 4, 0, "halving_doubling"), Mode("dist_async", 3, 1))
N = 3 * BOUND


def full(value, n=N):
    return np.full(n, value, np.float32)


@pytest.mark.grid
@on(*MODES)
def test_after_a_barrier_every_push_before_it_counts(store, W, unruly):
    store.set_optimizer(optimizers.create("test"))
    store.init(["a", "b"], [full(0), full(0, 3)])
    for i in range(1, 7):
        store.push(["a", "b"], [full(1), full(2, 3)])
        store.barrier()
        assert [uniform(store.pull(key)) for key in "ab"] == [W * i, 2 * W * i]
        store.barrier()


@pytest.mark.grid
@on(*MODES)
def test_optimizers_and_states_between_pushes(store, W, unruly, tmp_path):
    """Nothing that is pushed before or after a collective call slips to its other side."""
    store.init("w", full(0))
    expected = 0.0
    for rate in (1.0, 10.0, 100.0):
        optimizer = optimizers.create("sgd", learning_rate=rate)
        store.set_optimizer(optimizer)
        store.push("w", full(-1))
        optimizer.learning_rate = 2 * rate
        store.push("w", full(-1))
        store.save_optimizer_states(tmp_path / "states")
        expected += 3 * rate * W
        store.barrier()
        assert uniform(store.pull("w")) == expected
        store.barrier()


@pytest.mark.grid
@on(*MODES)
def test_another_optimizer_begins_with_the_pushes_after_it(store, W, unruly):
    """Without a pull or a barrier before it."""
    store.init(["a", "b"], [full(0), full(0, 2000)])
    for rate in (1, 10, 100):
        store.set_optimizer(optimizers.create("test", rescale_grad=rate))
        for _ in range(3):
            store.push(["a", "b"], [full(1), full(1, 2000)])
    store.barrier()
    assert [uniform(store.pull(key)) for key in "ab"] == [333 * W] * 2
