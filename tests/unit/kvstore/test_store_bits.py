"""Same bits: on every worker, from run to run whatever arrives first, and of servers as of owners in the workers."""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import pytest
from direct_stores import CALLS, exchange
from on_workers import on
from store_modes import ADDING, BOUND, FEW_ON_DEVICE, HYBRID, MESSAGES, SERVED, Mode

from mpikv import RowSparse, optimizers

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
SIZES = (0, 1, BOUND - 1, 2 * BOUND, 8 * BOUND + 3)
# Each size in two dtypes.
KEYS = {f"{n}-{k}": (np.dtype(DTYPES[(i + k) % 4]), n) for i, n in enumerate(SIZES) for k in (0, 1)}
ROWS = (7, 3)  # of a row-sparse key
OF_LISTS = [call for call in CALLS if call != "singles"]  # which would wait for other keys than other workers
OPS = ("sum", "mean", "min", "max", "prod")
ROUNDS = 2  # with each optimizer
OPTIMIZERS = {
    "none": [None],
    "in turn": [
        lambda: optimizers.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01),
        lambda: optimizers.create("lamb", learning_rate=0.01),  # which needs whole values
        lambda: optimizers.create("adam", learning_rate=0.01),
    ],
}


def value_of(key, worker, number, most=4):
    dtype, n = KEYS[key]
    numbers = np.random.default_rng([n, dtype.itemsize, worker, number])
    return (numbers.standard_normal(n) * 10.0 ** numbers.integers(-3, most, n)).astype(dtype)


def rows_of(worker, number):
    numbers = np.random.default_rng([worker, number])
    ids = numbers.integers(0, ROWS[0], numbers.integers(0, 9))
    return RowSparse(ids, numbers.standard_normal((ids.size, ROWS[1])), ROWS)


def bits(mode, name="none", *, any_calls=None, late=False, **changes):
    """The bytes of every value that a worker gets, on every worker.

    any_calls: a folder. Each call is of another form then, with keys in an order of the worker's own and the same
    arrays again; states are saved there and loaded between optimizers, which changes nothing.
    """

    def body(store):
        dice, number, found = random.Random(store.rank), 0, []
        for key, (dtype, n) in KEYS.items():
            store.init(key, np.linspace(-1, 1, n).astype(dtype))
        store.init("rows", RowSparse.zeros(ROWS, "float64"))
        arrays, outs = ({key: np.empty(n, dtype) for key, (dtype, n) in KEYS.items()} for _ in range(2))

        def every_key():
            for key, array in arrays.items():
                array[...] = value_of(key, store.rank, number)
            order = dice.sample([*KEYS], len(KEYS)) if any_calls else [*KEYS]
            values = [arrays[key] for key in order]
            call = dice.choice(OF_LISTS) if any_calls else "push and pull"
            exchange(store, call, order, values, [outs[key] for key in order])
            return [array.tobytes() for array in arrays.values()]

        for optimizer in OPTIMIZERS[name]:
            if optimizer is not None:
                store.set_optimizer(optimizer())
            for _ in range(ROUNDS):
                found += every_key()
                if optimizer is None:
                    store.push("rows", rows_of(store.rank, number))
                    found.append(store.pull("rows", ignore_sparse=False).tobytes())
                number += 1
            if optimizer is not None and any_calls:
                store.save_optimizer_states(any_calls / "states")
                store.load_optimizer_states(any_calls / "states")
        for op in OPS if name == "none" else ():
            for key in KEYS:
                value = value_of(key, store.rank, number, most=1)
                value[store.rank :: 50] = np.nan  # one of any worker is one on all
                store.pushpull(key, value, op=op)
                found.append(value.tobytes())
                assert np.isnan(value[: store.num_workers]).all()
        return found

    return mode.run(body, late=late, **changes)


@on(
    *(Mode("dist_sync", w, 0, a) for w, a in ((3, "owners"), (2, "ring"), (5, "ring"), (5, "owners"))),
    *(Mode("local", 1), Mode("dist_sync", 3), Mode("dist_sync", 4, 3), SERVED, *HYBRID[:2], *ADDING[:2]),
    *(Mode("dist_sync", len(h), hosts=h, memory=m) for h, m in (("abc", "off"), ("aab", "auto"), ("ababb", "off"))),
    FEW_ON_DEVICE[1],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_worker_and_every_run(mode, name, tmp_path):
    """Whatever the calls, their order and what comes late."""
    runs = [bits(mode, name), bits(mode, name, any_calls=tmp_path, late=True)]
    assert {tuple(found) for run in runs for found in run} == {tuple(runs[0][0])}


@pytest.mark.parametrize(("name", "workers"), [("none", 2), ("in turn", 3)])
def test_servers_give_the_bits_of_owners_in_the_workers(name, workers):
    """Also where values are cut over servers, or whole, and travel in partitions, where messages come late."""
    in_workers = bits(Mode("dist_sync", workers, 0, "owners"), name)
    for servers, bound, memory, part_bytes in (
        *((1, BOUND, "auto", 1 << 20), (3, BOUND, "auto", 1 << 20), (1, 10**9, "auto", 32)),
        *((2, 10**9, "off", 32), (2, 20, "long", 32), (2, 20, "off", 32)),
    ):
        mode = Mode("dist_sync", workers, servers, memory=memory, part_bytes=part_bytes)
        assert bits(mode, name, late=True, bigarray_bound_elems=bound) == in_workers, mode


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_of_a_dist_store_gives_the_bits_of_a_local_store(name):
    local = bits(Mode("local", 1), name)
    for mode in (Mode("dist_sync", 1), Mode("dist_sync", 1, 2), *([] if name == "none" else [Mode("dist_async", 1)])):
        assert bits(mode, name) == local, mode


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
