"""The distributed stores between processes: each kind, against plain arithmetic and the local store."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest
from mpi_stores import full, modes, on_workers, uniform

from mpikv import Config, ConfigError, KeyNotInitialized, ShapeMismatch, kv, optimizers
from mpikv.testing.reference import ReferenceStore

DTYPES = tuple(
    np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64)
)
SHAPES = ((), (0,), (1,), (2, 3), (7, 11), (4099,))
BOUND = 50
GRID = [(f"{dtype}{shape}", dtype, shape) for dtype in DTYPES for shape in SHAPES]


def value_of(dtype, shape, worker, round_, device):
    n = int(np.prod(shape, dtype=int))
    return ((np.arange(n) * 3 + worker + 2 * round_ + device) % 4).reshape(shape).astype(dtype)


@pytest.mark.mpi
def test_grid(comm):
    """Every dtype and shape in every kind of store, several devices, two rounds."""
    for name, servers in modes(comm):
        workers = comm.Get_size() - servers
        reference = ReferenceStore(workers, synchronous=name == "dist_sync", update=lambda w, g: w + g)
        for key, dtype, shape in GRID:
            reference.init(key, np.ones(shape, dtype))
            for round_ in range(2):
                for worker in range(workers):
                    reference.push(worker, key, [value_of(dtype, shape, worker, round_, d) for d in range(2)])

        def body(store):
            store.set_optimizer(optimizers.create("test"))
            keys = [key for key, _, _ in GRID]
            store.init(keys, [np.full(shape, store.rank == 0, dtype) for _, dtype, shape in GRID])
            for round_ in range(2):
                for key, dtype, shape in GRID:
                    store.push(key, [value_of(dtype, shape, store.rank, round_, device) for device in range(2)])
            store.barrier()
            outs = [np.empty(shape, dtype) for _, dtype, shape in GRID]
            store.pull(keys, outs)
            return outs

        for outs in on_workers(comm, name, body, num_servers=servers, bigarray_bound_elems=BOUND):
            for (key, _, _), out in zip(GRID, outs, strict=True):
                np.testing.assert_array_equal(out, reference.pull(0, key), err_msg=f"{name}, {servers} servers, {key}")


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_arithmetic_of_mxnets_tests(comm, dtype):
    shapes, rate, rounds = ((2, 3), (1200, 1200), (1211, 1211)), 2, 2
    for name, servers in modes(comm)[:: 2 if comm.Get_size() > 2 else 1]:
        W = comm.Get_size() - servers

        def body(store, settle=name == "dist_async"):
            store.set_optimizer(optimizers.create("test", rescale_grad=rate))
            store.init(list(range(3)), [np.ones(shape, dtype) for shape in shapes])
            found = []
            for _ in range(rounds):
                for key, shape in enumerate(shapes):
                    store.push(key, np.full(shape, store.rank + 1, dtype))
                if settle:
                    store.barrier()
                found.append([uniform(store.pull(key)) for key in range(3)])
                if settle:
                    store.barrier()
            return found

        expected = [[1.0 + rate * W * (W + 1) // 2 * (i + 1)] * 3 for i in range(rounds)]
        assert on_workers(comm, name, body, num_servers=servers) == [expected] * W


@pytest.mark.mpi
def test_same_bits(comm):
    """Of all workers, of two runs, and of servers as of the naive algorithm with the same number of workers."""
    size = comm.Get_size()

    def bits(group, servers, algorithm):
        def body(store):
            numbers = np.random.default_rng([3, store.rank])
            store.init(["w", "b"], [full(0.5, 1001), full(0.5, 3)])
            store.set_optimizer(optimizers.create("adam", learning_rate=0.01))
            found = []
            for _ in range(3):
                time.sleep(0.001 * ((store.rank * 7) % 3))
                store.push("w", numbers.standard_normal(1001).astype(np.float32))
                store.push("b", numbers.standard_normal(3).astype(np.float32))
                found.append(store.pull("w").tobytes() + store.pull("b").tobytes())
            return found

        options = {"num_servers": servers, "algorithm": algorithm, "bigarray_bound_elems": BOUND}
        results = on_workers(group, "dist_sync", body, **options)
        assert all(result == results[0] for result in results)
        return results[0]

    for algorithm in ("naive", "ring", "halving_doubling"):
        assert bits(comm, 0, algorithm) == bits(comm, 0, algorithm)
    for servers in range(1, size):
        workers = comm.Split(0 if comm.Get_rank() < size - servers else 1)
        alone = bits(workers, 0, "naive") if comm.Get_rank() < size - servers else None
        workers.Free()
        together = bits(comm, servers, "auto")
        assert alone in (None, together)


@pytest.mark.mpi
def test_orders_and_rounds_ahead(comm):
    keys = list("abcde")

    for name, servers in modes(comm):

        def body(store):
            order = [str(key) for key in np.random.default_rng(store.rank).permutation(keys)]
            store.set_optimizer(optimizers.create("test"))
            for key in order:
                store.init(key, full(0, 3000))
            for round_ in range(4):
                for key in order[::-1]:
                    store.push_async(key, full(round_, 3000), priority=round_)
                time.sleep(0.002 * store.rank)
            store.wait_all()
            store.barrier()
            requests = {key: store.pull_async(key) for key in order}
            return [uniform(requests[key].wait()) for key in keys]

        W = comm.Get_size() - servers
        assert on_workers(comm, name, body, num_servers=servers, bigarray_bound_elems=BOUND) == [[6.0 * W] * 5] * W


@pytest.mark.mpi
def test_requests_under_way(comm):
    for name, servers in modes(comm):
        if name == "dist_async":
            continue

        def body(store):
            store.set_optimizer(optimizers.create("test"))
            store.init("w", full(0, 20_000))
            time.sleep(0.01 * store.rank)
            requests = [(store.push("w", full(1, 20_000)), store.pull_async("w"))[1] for _ in range(5)]
            return [uniform(request.wait()) for request in requests]

        W = comm.Get_size() - servers
        expected = [float(W * (i + 1)) for i in range(5)]
        assert on_workers(comm, name, body, num_servers=servers) == [expected] * W


@pytest.mark.mpi
@pytest.mark.parametrize("progress", ["thread", "calls"])
def test_progress_and_learning_rate(comm, progress):
    for name, servers in modes(comm):

        def body(store):
            store.init("w", full(0, 500))
            optimizer = optimizers.create("sgd", learning_rate=1.0)
            store.set_optimizer(optimizer)
            for rate in (1.0, 2.0, 4.0):
                optimizer.learning_rate = rate
                value = full(1, 500)
                store.pushpull("w", value)
                store.barrier()
            return uniform(store.pull("w"))

        W = comm.Get_size() - servers
        options = {"num_servers": servers, "progress": progress, "bigarray_bound_elems": BOUND}
        assert on_workers(comm, name, body, **options) == [-7.0 * W] * W


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_optimizers_against_the_local_store(comm, name):
    def gradient(worker, round_):
        return ((np.arange(240) * 5 + 3 * worker + round_) % 7 - 3).astype(np.float32).reshape(24, 10)

    for servers in range(comm.Get_size()):
        W = comm.Get_size() - servers
        local = kv.create("local")
        local.init("w", full(2, 24, 10))
        local.set_optimizer(optimizers.create(name, learning_rate=0.1))
        for round_ in range(3):
            local.push("w", sum(gradient(worker, round_) for worker in range(W)))

        def body(store):
            store.init("w", full(2, 24, 10))
            store.set_optimizer(optimizers.create(name, learning_rate=0.1))
            for round_ in range(3):
                store.push("w", gradient(store.rank, round_))
            return store.pull("w").tobytes()

        options = {"num_servers": servers, "bigarray_bound_elems": BOUND}
        assert on_workers(comm, "dist_sync", body, **options) == [local.pull("w").tobytes()] * W


def own_rule(weight, grad, state):
    """A callable of this module: it must reach server processes."""
    total = grad.copy() if state is None else state + grad
    weight -= total
    return total


@pytest.mark.mpi
def test_callables_reach_the_owners(comm):
    factor = 3.0
    for name, servers in modes(comm):
        for function, expected in ((own_rule, -3.0), (lambda w, g, s: np.subtract(w, factor * g, out=w) is None, -6.0)):

            def body(store, function=function, synchronous=name == "dist_sync"):
                store.init("w", full(0, 100))
                store.set_optimizer(function)
                if store.rank == 0 or synchronous:
                    for _ in range(2):
                        store.push("w", full(store.rank == 0, 100))
                store.barrier()
                return uniform(store.pull("w"))

            W = comm.Get_size() - servers
            assert on_workers(comm, name, body, num_servers=servers) == [expected] * W


@pytest.mark.mpi(min_size=2)
def test_mistakes_reach_every_worker(comm):
    for name, servers in modes(comm):
        W = comm.Get_size() - servers
        if W < 2:
            continue

        def body(store):
            store.set_optimizer(optimizers.create("test"))
            with pytest.raises(ShapeMismatch) as caught:
                store.init("bad", full(0, 3 + (store.rank == 1)))
            text = str(caught.value)
            with pytest.raises(ConfigError, match="worker 1 on"):
                store.set_optimizer(optimizers.create("sgd", learning_rate=1.0 + (store.rank == 1)))
            with pytest.raises(KeyNotInitialized, match="bad"):
                store.pull("bad")
            store.init("good", full(1, 3))
            with pytest.raises(KeyError):
                store.init("good", full(1, 3))
            with pytest.raises(ShapeMismatch):
                store.push("good", full(1, 4))
            store.barrier()
            return text, uniform(store.pull("good"))

        results = on_workers(comm, name, body, num_servers=servers)
        assert results == [results[0]] * W
        for part in ("'bad'", "worker 0 on ", "worker 1 on ", "(3,)", "(4,)"):
            assert part in results[0][0]


@pytest.mark.mpi
def test_what_create_refuses(comm):
    """On every rank, and the ranks can go on."""
    from mpi4py import MPI

    size, rank = comm.Get_size(), comm.Get_rank()
    for servers in (size, size + 3):
        with pytest.raises(ConfigError, match=rf"{servers} servers among {size} ranks"):
            kv.create("dist_sync", comm=comm, num_servers=servers)
    with pytest.raises(ConfigError, match="num_servers"):
        kv.create("dist_sync", comm=comm, num_servers=-1)
    with pytest.raises(ValueError, match="dist_async"):
        kv.create("dist_sink", comm=comm)
    with pytest.raises(TypeError, match="Intracomm"):
        kv.create("dist_sync", comm="world")
    for nobody in (MPI.COMM_NULL, comm.Split(MPI.UNDEFINED)):
        with pytest.raises(ValueError, match="COMM_NULL"):
            kv.create("dist_sync", comm=nobody)
    if size > 1:
        with pytest.raises(ConfigError, match=r"number of servers differs.*rank 0 on"):
            kv.create("dist_sync", comm=comm, num_servers=1 if rank == size - 1 else 0)
        with pytest.raises(
            ConfigError, match=r"type of the store differs.*dist_async.*dist_sync|dist_sync.*dist_async"
        ):
            kv.create("dist_async" if rank else "dist_sync", comm=comm)
        with pytest.raises(ConfigError, match=r"MPIKV_ALGORITHM differs.*ring"):
            kv.create("dist_sync", comm=comm, config=Config(algorithm="ring" if rank else "naive"))
    assert on_workers(comm, "dist_sync", lambda store: store.rank) == list(range(size))


@pytest.mark.mpi
def test_the_default_is_the_world(comm):
    with kv.create("dist", config=Config(timeout_s=30)) as store:
        assert (store.type, store.rank, store.num_workers) == ("dist", comm.Get_rank(), comm.Get_size())
        store.init(3, full(1, 2))
        store.pushpull(3, value := full(1, 2))
        assert uniform(value) == comm.Get_size()
    store.close()


@pytest.mark.mpi
def test_partitions(comm):
    """Large values in partitions, in place, from lists, pushed ahead of the others; small ones beside them."""
    partition_elems = (1 << 18) // 4
    sizes = (5, partition_elems, partition_elems + 1, 3 * partition_elems + 77, 0)

    def value(n, worker, round_):
        return ((np.arange(n) * 3 + worker + 2 * round_) % 4).astype(np.float32)

    for name, servers in modes(comm):
        workers = comm.Get_size() - servers

        def body(store):
            keys = [str(n) for n in sizes]
            store.init(keys, [np.zeros(n, np.float32) for n in sizes])
            store.set_optimizer(optimizers.create("test"))
            for round_ in range(5):
                arrays = [value(n, store.rank, round_) for n in sizes]
                if round_ < 2:
                    store.push(keys, arrays, priority=round_)
                    for array in arrays:
                        array.fill(-1)
                elif round_ == 2 or store.rank == 0:
                    store.pushpull(keys, arrays)
                else:
                    requests = [
                        store.pushpull_async(key, array, np.empty_like(array), priority=-i)
                        for i, (key, array) in enumerate(zip(keys, arrays, strict=True))
                    ]
                    for request in reversed(requests):
                        request.wait()
            store.barrier()
            return store.pull(keys)

        expected = [sum(value(n, worker, round_) for worker in range(workers) for round_ in range(5)) for n in sizes]
        for outs in on_workers(comm, name, body, num_servers=servers, partition_bytes=4 * partition_elems):
            for out, right in zip(outs, expected, strict=True):
                np.testing.assert_array_equal(out, right, err_msg=f"{name}, {servers} servers")


@pytest.mark.mpi
def test_a_value_that_is_to_be_cut_into_tens_of_thousands_of_pieces(comm):
    """By messages, which MPI may have to look through by the thousand: seconds, and not minutes."""
    n = 180_000
    for servers in range(min(comm.Get_size(), 2)):  # one rank alone is a worker
        workers = comm.Get_size() - servers

        def body(store):
            store.init("w", np.zeros(n, np.float32))
            store.set_optimizer(optimizers.create("test"))
            value = np.full(n, store.rank + 1, np.float32)
            store.push("w", value)
            store.push("w", value)
            store.barrier()
            return store.pull("w")

        changes = {"partition_bytes": 16, "shared_memory": "off"}
        for out in on_workers(comm, "dist_async", body, num_servers=servers, **changes):
            np.testing.assert_array_equal(out, workers * (workers + 1), err_msg=f"{servers} servers")
