"""Same bits: on every worker, from run to run whatever arrives first, and of servers as of the reference algorithm."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from on_workers import on
from store_modes import ADDING, BOUND, HYBRID, Mode

from mpikv import optimizers

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
SIZES = (1, BOUND - 1, 8 * BOUND + 3)
KEYS = [(f"{np.dtype(dtype)}-{n}", dtype, n) for dtype in DTYPES for n in SIZES]
ROUNDS = 3


def _bits(mode, optimizer, *, late=False):
    """The bytes of every pulled value on every worker."""

    def body(store):
        numbers = np.random.default_rng([7, store.rank])
        found = []
        for key, dtype, n in KEYS:
            store.init(key, np.linspace(-1, 1, n).astype(dtype))
        if optimizer is not None:
            store.set_optimizer(optimizer())
        for _ in range(ROUNDS):
            for key, dtype, n in KEYS:
                store.push(key, (numbers.standard_normal(n) * 10.0 ** numbers.integers(-3, 4, n)).astype(dtype))
            found += [store.pull(key).tobytes() for key, _, _ in KEYS]
        return found

    return mode.run(body, late=late)


MODES = [Mode("dist_sync", w, 0, a) for w in (2, 3, 5) for a in ("naive", "ring", "halving_doubling")]
MODES += [Mode("dist_sync", 3, 1), Mode("dist_sync", 4, 3), *HYBRID[1:4], *ADDING]


@pytest.mark.grid(1)
@on(*MODES)
def test_every_worker_and_every_run(mode):
    runs = [_bits(mode, None, late=late) for late in (False, True, True)]
    assert {tuple(found) for run in runs for found in run} == {tuple(runs[0][0])}


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
    naive = _bits(Mode("dist_sync", workers, 0, "naive"), OPTIMIZERS[name])
    for servers in (1, 3):
        assert _bits(Mode("dist_sync", workers, servers), OPTIMIZERS[name], late=True) == naive


@pytest.mark.grid(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@on(*ADDING)
def test_what_servers_get_is_added_host_by_host(mode, dtype):
    """In the order of the ranks on each host, then in the order of the hosts."""
    n = 1000

    def numbers(worker):
        return (np.random.default_rng(worker).standard_normal(n) * 10.0 ** (worker % 3)).astype(dtype)

    def body(store):
        store.init("w", np.zeros(n, dtype))
        share = store.stats()["servers_take"]["w"]
        store.pushpull("w", numbers(store.rank), out=(out := np.empty(n, dtype)))
        return round((1 - share) * n), out

    sums = {}
    for worker, host in enumerate(mode.hosts[: mode.workers]):
        sums[host] = sums[host] + numbers(worker) if host in sums else numbers(worker)
    expected = sum(sums.values())
    for cut, found in mode.run(body, late=True):
        assert cut < n
        assert found[cut:].tobytes() == expected[cut:].tobytes()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_one_worker_of_a_dist_store_gives_the_bits_of_a_local_store():
    for name, optimizer in OPTIMIZERS.items():
        local = _bits(Mode("local", 1), optimizer)
        for mode in (Mode("dist_sync", 1), Mode("dist_sync", 1, 2), *([Mode("dist_async", 1)] if optimizer else [])):
            assert _bits(mode, optimizer) == local, (name, mode)


@on(Mode("dist_sync", 3, 0, "naive"), Mode("dist_sync", 3, 0, "ring"), Mode("dist_sync", 3, 2))
def test_float16_counts_the_workers_in_float32(store):
    """2048 + 1 + 1 is 2048 when added in float16."""
    store.init("w", np.zeros(3, np.float16))
    store.push("w", np.full(3, 2048 if store.rank == 0 else 1, np.float16))
    assert store.pull("w").tolist() == [2050.0] * 3
