"""Every algorithm, forced by name, between processes."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from adasum_reference import close, random_vectors
from mpi_stores import full, on_workers, uniform

from mpikv import ConfigError, optimizers
from mpikv.collectives.ring import SEGMENT_BYTES

ALGORITHMS = ("naive", "ring", "halving_doubling", "hierarchical", "native", "auto")
FORCED = pytest.mark.parametrize("algorithm", ALGORITHMS)
SEGMENT = SEGMENT_BYTES // 4  # in float32
SIZES = (0, 1, 2, 3, 5, 16, 1000, 4 * SEGMENT - 1, 5 * SEGMENT + 7)


def value_of(n, worker, round_):
    return ((np.arange(n) * 7 + 3 * worker + round_) % 11 - 5).astype(np.float32)


@pytest.mark.mpi
@FORCED
def test_sizes(comm, algorithm):
    def body(store):
        store.init(list(range(len(SIZES))), [full(0, n) for n in SIZES])
        for round_ in range(2):
            for key, n in enumerate(SIZES):
                store.push(key, value_of(n, store.rank, round_))
            for key, n in enumerate(SIZES):
                expected = sum(value_of(n, worker, round_) for worker in range(store.num_workers))
                np.testing.assert_array_equal(store.pull(key), expected)
        return True

    assert on_workers(comm, "dist_sync", body, algorithm=algorithm) == [True] * comm.Get_size()


@pytest.mark.mpi
@FORCED
def test_dtypes(comm, algorithm):
    dtypes = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64)

    def body(store):
        store.init([str(np.dtype(d)) for d in dtypes], [np.zeros(37, d) for d in dtypes])
        for dtype in dtypes:
            value = ((np.arange(37) + store.rank) % 5).astype(dtype)
            store.pushpull(str(np.dtype(dtype)), value)
            expected = sum((np.arange(37) + worker) % 5 for worker in range(store.num_workers))
            assert value.dtype == dtype
            np.testing.assert_array_equal(value.astype(np.float64), expected)
        return True

    assert on_workers(comm, "dist_sync", body, algorithm=algorithm) == [True] * comm.Get_size()


@pytest.mark.mpi
@FORCED
def test_reductions(comm, algorithm):
    functions = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
    dtypes = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64)

    def values(worker):
        return (np.arange(37) + worker) % 2 + 1

    def body(store):
        W = store.num_workers
        store.init([str(np.dtype(d)) for d in dtypes], [np.zeros(37, d) for d in dtypes])
        for dtype in dtypes:
            for op in ("sum", "min", "max", "prod") if np.dtype(dtype).kind in "iu" else functions:
                value = values(store.rank).astype(dtype)
                store.pushpull(str(np.dtype(dtype)), value, op=op)
                expected = functools.reduce(functions[op], [values(worker) for worker in range(W)])
                if op == "mean":
                    expected = expected.astype(np.float32 if value.itemsize < 8 else np.float64) / W
                np.testing.assert_array_equal(value, expected.astype(dtype))
        return True

    assert on_workers(comm, "dist_sync", body, algorithm=algorithm) == [True] * comm.Get_size()


@pytest.mark.mpi
@FORCED
def test_adasum(comm, algorithm):
    """Beside sums of the same keys, in another order on each worker; the bits of one worker are those of all."""
    sizes = dict(enumerate((0, 1, 2, 37, 5 * SEGMENT + 7)))

    def body(store):
        W, found = store.num_workers, []
        store.init(list(sizes), [full(0, n) for n in sizes.values()])
        for round_ in range(3):
            every = {key: random_vectors(W, n, "float32", round_) for key, n in sizes.items()}
            values = {key: every[key][store.rank].copy() for key in sizes}
            order = np.random.default_rng([store.rank, round_]).permutation(list(sizes)).tolist()
            for call in [store.pushpull_async(key, values[key], op="adasum") for key in order]:
                call.wait()
            for key in sizes:
                close(values[key], every[key])
                found.append(values[key].tobytes())
            store.pushpull(list(sizes), ones := [full(1, n) for n in sizes.values()])
            assert [uniform(one) for one in ones if one.size] == [W] * 4
            again = [every[key][store.rank] for key in sizes]
            store.pushpull(list(sizes), again, op="adasum")
            assert [one.tobytes() for one in again] == found[-len(sizes) :]
        return found

    told = on_workers(comm, "dist_sync", body, algorithm=algorithm)
    assert told == [told[0]] * comm.Get_size()


@pytest.mark.mpi
@FORCED
def test_keys_pushed_in_different_orders(comm, algorithm):
    keys = list(range(8))

    def body(store):
        store.init(keys, [full(0, 10 ** (key % 4)) for key in keys])
        for round_ in range(1, 4):
            order = np.random.default_rng([store.rank, round_]).permutation(keys).tolist()
            for key in order:
                store.push(key, full(round_ * key, 10 ** (key % 4)))
            for key in reversed(order):
                assert uniform(store.pull(key)) == store.num_workers * round_ * key
        return True

    assert on_workers(comm, "dist_sync", body, algorithm=algorithm) == [True] * comm.Get_size()


@pytest.mark.mpi
@FORCED
def test_keys_initialised_in_different_orders(comm, algorithm):
    keys = [str(key) for key in range(6)]

    def body(store):
        store.set_optimizer(optimizers.create("test"))
        for key in np.random.default_rng(store.rank).permutation(keys).tolist():
            store.init(key, full(int(key) if store.rank == 0 else -1, 2000))
            store.push(key, full(1, 2000))
        return [uniform(store.pull(key)) for key in keys]

    W = comm.Get_size()
    assert on_workers(comm, "dist_sync", body, algorithm=algorithm) == [[float(i + W) for i in range(6)]] * W


@pytest.mark.mpi
@FORCED
def test_optimizer_in_the_middle(comm, algorithm):
    """State once over all workers; an optimizer that needs whole keys; a change from one to the other."""

    def body(store):
        store.init(["a", "b"], [full(0, 1001), full(1, 3)])
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0, momentum=0.5))
        for _ in range(2):
            store.push(["a", "b"], [full(1, 1001), full(1, 3)])
        found = [uniform(store.pull("a")), uniform(store.pull("b"))]
        store.set_optimizer(optimizers.create("lamb", learning_rate=0.5))
        store.push(["a", "b"], [full(1, 1001), full(1, 3)])
        moved = [uniform(store.pull("a")), uniform(store.pull("b"))]
        return found, moved

    W = comm.Get_size()
    results = on_workers(comm, "dist_sync", body, algorithm=algorithm)
    assert results == [results[0]] * W
    found, moved = results[0]
    assert found == [-2.5 * W, 1 - 2.5 * W]
    assert moved[0] < found[0]
    assert moved[1] < found[1]


@pytest.mark.mpi
def test_float16_is_added_in_float32(comm):
    W = comm.Get_size()

    def body(store):
        store.init("w", np.zeros(9, np.float16))
        store.push("w", np.full(9, 2048 if store.rank == 0 else 0.5, np.float16))
        return uniform(store.pull("w"))

    expected = float(np.float16(2048 + 0.5 * (W - 1)))
    for algorithm in ALGORITHMS:
        assert on_workers(comm, "dist_sync", body, algorithm=algorithm) == [expected] * W


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("n_hosts", [2, 3, 4])
def test_pretended_hosts(comm, n_hosts):
    """`auto` goes by the hosts; with fewer ranks than hosts every rank says so."""
    W = comm.Get_size()
    if n_hosts > W:
        with pytest.raises(ConfigError, match=f"MPIKV_TEST_HOSTS={n_hosts}, but there are only {W} ranks"):
            on_workers(comm, "dist_sync", lambda store: None, test_hosts=n_hosts)
        return

    def body(store):
        store.init(list(range(len(SIZES))), [full(0, n) for n in SIZES])
        for round_ in range(2):
            for key, n in enumerate(SIZES):
                value = value_of(n, store.rank, round_)
                store.pushpull(key, value)
                np.testing.assert_array_equal(value, sum(value_of(n, worker, round_) for worker in range(W)))
        return True

    assert on_workers(comm, "dist_sync", body, test_hosts=n_hosts) == [True] * W
