"""The arithmetic of MXNet's distributed tests, restated.

With the optimizer 'test' at rate 2, value 1 and worker r pushing r + 1, every weight is 1 + 2 * W(W+1)/2 * (i+1) after
round i. Shapes: a small one, one a little above a large array's bound, one of a prime number of rows.
"""

from __future__ import annotations

import numpy as np
import pytest
from store_modes import Mode, mode_id

from mpikv import optimizers

RATE = 2
ROUNDS = 3
SHAPES = ((2, 3), (1200, 1200), (1211, 1211))
DTYPES = (np.float16, np.float32)
KEYS = [(f"{np.dtype(dtype)}{shape}", dtype, shape) for dtype in DTYPES for shape in SHAPES]


def _weight(num_workers, rounds):
    return 1 + RATE * num_workers * (num_workers + 1) // 2 * rounds


def _store_with_keys(store):
    store.set_optimizer(optimizers.create("test", rescale_grad=RATE))
    for key, dtype, shape in KEYS:
        store.init(key, np.ones(shape, dtype))


@pytest.mark.parametrize(
    "mode",
    [Mode("dist_sync", 3, 0, a) for a in ("auto", "naive", "ring", "halving_doubling")] + [Mode("dist_sync", 3, 2)],
    ids=mode_id,
)
def test_synchronous(mode):
    def body(store):
        _store_with_keys(store)
        found = []
        for round_ in range(ROUNDS):
            for key, dtype, shape in KEYS:
                store.push(key, np.full(shape, store.rank + 1, dtype))
            for key, dtype, shape in KEYS:
                out = np.zeros(shape, dtype)
                store.pull(key, out)
                found.append((key, round_, np.unique(out).tolist()))
        return found

    expected = [(key, i, [_weight(mode.workers, i + 1)]) for i in range(ROUNDS) for key, _, _ in KEYS]
    assert mode.run(body, bigarray_bound_elems=1_000_000) == [expected] * mode.workers


@pytest.mark.parametrize("mode", [Mode("dist_async", 3), Mode("dist_async", 3, 2)], ids=mode_id)
def test_asynchronous_total_after_a_barrier(mode):
    def body(store):
        _store_with_keys(store)
        for _ in range(ROUNDS):
            for key, dtype, shape in KEYS:
                store.push(key, np.full(shape, store.rank + 1, dtype))
        store.barrier()
        return [np.unique(store.pull(key)).tolist() for key, _, _ in KEYS]

    expected = [[_weight(mode.workers, ROUNDS)]] * len(KEYS)
    assert mode.run(body, bigarray_bound_elems=1_000_000) == [expected] * mode.workers


def test_float16_counts_the_workers_in_float32():
    """2048 + 1 + 1 is 2048 when added in float16."""

    def body(store):
        store.init("w", np.zeros(3, np.float16))
        store.push("w", np.full(3, 2048 if store.rank == 0 else 1, np.float16))
        return store.pull("w").tolist()

    for mode in (Mode("dist_sync", 3, 0, "naive"), Mode("dist_sync", 3, 0, "ring"), Mode("dist_sync", 3, 2)):
        assert mode.run(body) == [[2050.0] * 3] * 3
