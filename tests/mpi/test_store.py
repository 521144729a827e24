"""The distributed stores between processes: each kind goes through the checks that all modes go through."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mpi_stores import full, modes, on_workers, uniform
from store_checks import every_check
from store_modes import BOUND, Mode

from mpikv import Config, ConfigError, kv, optimizers
from mpikv.testing.paths import DTYPES, check_path

ALGORITHMS = pytest.mark.parametrize("algorithm", ["auto", "ring", "owners", "native"])


@pytest.mark.mpi
@ALGORITHMS
def test_values(comm, algorithm):
    for i, (name, servers) in enumerate(modes(comm, algorithm)):
        settings = {"bigarray_bound_elems": BOUND, "partition_bytes": 1000, "algorithm": algorithm}

        def run(body, name=name, servers=servers, settings=settings):
            return on_workers(comm, name, body, num_servers=servers, **settings)

        workers, dtypes = comm.Get_size() - servers, DTYPES[::2] if algorithm == "native" else [DTYPES[i % len(DTYPES)]]
        check_path(run, workers, dtypes=dtypes, synchronous=name == "dist_sync")


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of np.matrix
@ALGORITHMS
@pytest.mark.parametrize("progress", ["thread", "calls"])
def test_every_check(comm, progress, algorithm):
    for name, servers in modes(comm, algorithm):
        mode = Mode(name, comm.Get_size() - servers, servers)
        options = {"num_servers": servers, "bigarray_bound_elems": BOUND, "progress": progress, "algorithm": algorithm}
        on_workers(comm, name, lambda store, mode=mode: every_check(store, mode), **options)


@pytest.mark.mpi
@ALGORITHMS
def test_optimizers(comm, algorithm):
    """State once over all workers; a change to an optimizer of whole keys."""

    def body(store):
        W = store.num_workers
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
            kv.create("dist_sync", comm=comm, config=Config(algorithm="ring" if rank else "owners"))
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
def test_a_value_that_is_to_be_cut_into_tens_of_thousands_of_pieces(comm):
    """By messages, which MPI may have to look through by the thousand: seconds, and not minutes."""
    n = 180_000
    for servers in range(min(comm.Get_size(), 2)):  # one rank alone is a worker
        workers = comm.Get_size() - servers

        def body(store):
            store.init("w", np.zeros(n, np.float32))
            store.set_optimizer(optimizers.create("test"))
            for _ in range(2):
                store.push("w", full(store.rank + 1, n))
            store.barrier()
            return uniform(store.pull("w"))

        changes = {"partition_bytes": 16, "shared_memory": "off"}
        found = on_workers(comm, "dist_async", body, num_servers=servers, **changes)
        assert found == [workers * (workers + 1)] * workers


# --- states saved by one number of workers and servers and loaded by another

SHAPES = {"s": (), "a": (7,), "b": (13, 9)}


def start(store, values):
    for key, shape in SHAPES.items():
        store.init(key, full(2, shape) if values is None else values[key])
    store.set_optimizer(optimizers.SGD(learning_rate=0.25, momentum=0.5))


def rounds(store, first, last):
    """Summed over the workers the gradients are the same integers for any number of them."""
    for round_ in range(first, last):
        for key, shape in SHAPES.items():
            total = ((np.arange(np.prod(shape, dtype=int)) * 5 + round_) % 7 - 3).reshape(shape).astype(np.float32)
            store.push(key, total * (store.rank == 0))
    return {key: store.pull(key) for key in SHAPES}


def bits(values):
    return {key: value.tobytes() for key, value in values.items()}


@pytest.mark.mpi
def test_goes_on_with_other_numbers(comm, tmp_path):
    """Saved by each split of the ranks into workers and servers, loaded by each of a smaller group."""
    rank, size = comm.Get_rank(), comm.Get_size()
    path = os.path.join(comm.bcast(str(tmp_path)), "states")

    def whole(store):
        start(store, None)
        middle = rounds(store, 0, 2)
        store.save_optimizer_states(path, dump_optimizer=True)
        return middle, bits(rounds(store, 2, 4))

    groups = [(comm.Split(0 if rank < n else 1), n) for n in sorted({1, size - 1, size} - {0})]
    for servers in range(size):
        middle, expected = on_workers(comm, "dist_sync", whole, num_servers=servers, bigarray_bound_elems=10)[0]

        def second_half(store, values=middle):
            start(store, values)
            store.load_optimizer_states(path)
            return bits(rounds(store, 2, 4))

        for group, n in groups:
            if rank < n:
                options = {"num_servers": min(1, n - 1), "bigarray_bound_elems": 11}
                assert on_workers(group, "dist_sync", second_half, **options) == [expected] * (n - min(1, n - 1))
        comm.Barrier()
    for group, _ in groups:
        group.Free()
    if rank == 0:
        assert os.listdir(os.path.dirname(path)) == ["states"]
