"""Same bits: on every worker, from run to run whatever arrives first, and of servers as of the reference algorithm."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from on_workers import on
from store_modes import ADDING, BOUND, FEW_ON_DEVICE, HYBRID, MESSAGES, SERVED, Mode

from mpikv import optimizers

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
KEYS = [(f"{np.dtype(dtype)}-{n}", dtype, n) for dtype in DTYPES for n in (1, BOUND - 1, 8 * BOUND + 3)]
OPS = ("sum", "mean", "min", "max", "prod")


def _bits(mode, optimizer, *, late=False):
    """The bytes of every pulled value on every worker."""

    def body(store):
        numbers = np.random.default_rng([7, store.rank])
        found = []
        for key, dtype, n in KEYS:
            store.init(key, np.linspace(-1, 1, n).astype(dtype))
        if optimizer is not None:
            store.set_optimizer(optimizer())
        for _ in range(3):
            for key, dtype, n in KEYS:
                store.push(key, (numbers.standard_normal(n) * 10.0 ** numbers.integers(-3, 4, n)).astype(dtype))
            found += [store.pull(key).tobytes() for key, _, _ in KEYS]
        for op in OPS if optimizer is None else ():
            for key, dtype, n in KEYS:
                value = numbers.standard_normal(n).astype(dtype)
                value[store.rank :: 50] = np.nan  # one of any worker is one on all
                store.pushpull(key, value, op=op)
                found.append(value.tobytes())
                assert np.isnan(value[: store.num_workers]).all()
        return found

    return mode.run(body, late=late)


@on(
    *(Mode("dist_sync", w, 0, a) for w, a in ((3, "owners"), (2, "ring"), (5, "ring"), (5, "owners"))),
    *(Mode("dist_sync", 4, 3), HYBRID[1], *ADDING[:2], Mode("dist_sync", 3)),
)
def test_every_worker_and_every_run(mode):
    runs = [_bits(mode, None, late=late) for late in (False, True)]
    assert {tuple(found) for run in runs for found in run} == {tuple(runs[0][0])}


OPTIMIZERS = {
    "none": None,
    "sgd": lambda: optimizers.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01),
    "adam": lambda: optimizers.create("adam", learning_rate=0.01),
    "lamb": lambda: optimizers.create("lamb", learning_rate=0.01),
}


@pytest.mark.parametrize(("name", "workers"), [("none", 2), ("sgd", 3), ("adam", 5), ("lamb", 3)])
def test_servers_give_the_bits_of_owners_in_the_workers(name, workers):
    in_workers = _bits(Mode("dist_sync", workers, 0, "owners"), OPTIMIZERS[name])
    for servers in (1, 3):
        assert _bits(Mode("dist_sync", workers, servers), OPTIMIZERS[name], late=True) == in_workers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_of_a_dist_store_gives_the_bits_of_a_local_store(name):
    local = _bits(Mode("local", 1), OPTIMIZERS[name])
    for mode in (Mode("dist_sync", 1), Mode("dist_sync", 1, 2), *([] if name == "none" else [Mode("dist_async", 1)])):
        assert _bits(mode, OPTIMIZERS[name]) == local, mode


@on(*ADDING)
def test_what_servers_get_is_added_host_by_host(mode):
    """In the order of the ranks on each host, then in the order of the hosts."""
    n, dtype = 1000, np.float32 if mode.workers == 3 else np.float64

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


@on(Mode("dist_sync", 3), MESSAGES, SERVED, FEW_ON_DEVICE[0])
def test_large_values(store, W):
    n = 300_001
    values = [((np.arange(n) * 5 + worker * 7) % 4 + 1).astype(np.float32) for worker in range(W)]
    functions = dict(zip(OPS, (np.add, np.add, np.minimum, np.maximum, np.multiply), strict=True))
    store.init("w", np.zeros(n, np.float32))
    shared = store.zeros(n)
    for op, function in functions.items():
        expected = function.reduce(values) / np.float32(W if op == "mean" else 1)
        for array in (shared, np.empty(n, np.float32)):
            array[:] = values[store.rank]
            store.pushpull("w", array, op=op)
            assert array.tobytes() == expected.tobytes()
