"""Same bits: on every worker, from run to run whatever arrives first, and of servers as of the reference algorithm."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest
from store_modes import BOUND, Mode, mode_id

from mpikv import optimizers

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
SIZES = (1, BOUND - 1, 8 * BOUND + 3)
KEYS = [(f"{np.dtype(dtype)}-{n}", dtype, n) for dtype in DTYPES for n in SIZES]
ROUNDS = 3


def _bits(mode, optimizer, jitter):
    """The bytes of every pulled value on every worker. jitter: seed of each worker's naps between calls."""

    def body(store):
        naps = np.random.default_rng([jitter, store.rank])
        numbers = np.random.default_rng([7, store.rank])
        found = []
        for key, dtype, n in KEYS:
            store.init(key, np.linspace(-1, 1, n).astype(dtype))
        if optimizer is not None:
            store.set_optimizer(optimizer())
        for _ in range(ROUNDS):
            for key, dtype, n in KEYS:
                value = (numbers.standard_normal(n) * 10.0 ** numbers.integers(-3, 4, n)).astype(dtype)
                time.sleep(naps.choice([0.0, 0.0, 0.0005]))
                store.push(key, value)
            found += [store.pull(key).tobytes() for key, _, _ in KEYS]
        return found

    return mode.run(body)


MODES = [Mode("dist_sync", w, 0, a) for w in (2, 3, 5) for a in ("naive", "ring", "halving_doubling")]
MODES += [Mode("dist_sync", 3, 1), Mode("dist_sync", 4, 3)]


@pytest.mark.grid(1)
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_every_worker_and_every_run(mode):
    runs = [_bits(mode, None, jitter) for jitter in (1, 2, 3)]
    for run in runs:
        for found in run:
            assert found == runs[0][0]


OPTIMIZERS = {
    "none": None,
    "sgd": lambda: optimizers.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01),
    "adam": lambda: optimizers.create("adam", learning_rate=0.01),
    "lamb": lambda: optimizers.create("lamb", learning_rate=0.01),
}


@pytest.mark.grid(1)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_servers_give_the_bits_of_the_naive_algorithm(name, workers):
    naive = _bits(Mode("dist_sync", workers, 0, "naive"), OPTIMIZERS[name], 1)
    for servers in (1, 3):
        assert _bits(Mode("dist_sync", workers, servers), OPTIMIZERS[name], 2) == naive


def test_the_naive_sum_is_in_the_order_of_the_workers():
    """Against plain loops, since comparing runs would not find an order that is always the same and wrong."""
    workers = 4
    values = [np.random.default_rng(w).standard_normal(33).astype(np.float32) for w in range(workers)]
    expected = values[0]
    for value in values[1:]:
        expected = expected + value
    for mode in (Mode("dist_sync", workers, 0, "naive"), Mode("dist_sync", workers, 2)):

        def body(store):
            store.init("w", np.zeros(33, np.float32))
            store.push("w", values[store.rank])
            return store.pull("w").tobytes()

        assert mode.run(body) == [expected.tobytes()] * workers


def test_one_worker_of_a_dist_store_gives_the_bits_of_a_local_store():
    for name, optimizer in OPTIMIZERS.items():
        local = _bits(Mode("local", 1), optimizer, 1)
        for mode in (Mode("dist_sync", 1), Mode("dist_sync", 1, 2), *([Mode("dist_async", 1)] if optimizer else [])):
            assert _bits(mode, optimizer, 1) == local, (name, mode)


def test_float16_counts_the_workers_in_float32():
    """2048 + 1 + 1 is 2048 when added in float16."""

    def body(store):
        store.init("w", np.zeros(3, np.float16))
        store.push("w", np.full(3, 2048 if store.rank == 0 else 1, np.float16))
        return store.pull("w").tolist()

    for mode in (Mode("dist_sync", 3, 0, "naive"), Mode("dist_sync", 3, 0, "ring"), Mode("dist_sync", 3, 2)):
        assert mode.run(body) == [[2050.0] * 3] * 3
