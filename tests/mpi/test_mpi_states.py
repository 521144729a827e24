"""Optimizer states saved by one number of workers and servers and loaded by another, between processes."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mpi_stores import full, modes, on_workers

from mpikv import StatesFileError, optimizers

SHAPES = {"s": (), "a": (7,), "b": (13, 9)}
BOUND = 10
MAKERS = {
    "sgd": lambda: optimizers.create("sgd", learning_rate=0.25, momentum=0.5),
    "lamb": lambda: optimizers.create("lamb", learning_rate=0.125),
}


def gradient(store, key, round_):
    """Summed over the workers the same integers for any number of them."""
    n = int(np.prod(SHAPES[key], dtype=int))
    total = ((np.arange(n) * 5 + round_) % 7 - 3).reshape(SHAPES[key]).astype(np.float32)
    return total if store.rank == 0 else np.zeros_like(total)


def rounds(store, first, last):
    for round_ in range(first, last):
        for key in SHAPES:
            store.push(key, gradient(store, key, round_))
    return {key: store.pull(key) for key in SHAPES}


@pytest.mark.mpi
@pytest.mark.parametrize("name", MAKERS)
def test_goes_on_with_other_numbers(comm, name, tmp_path):
    """Saved by each split of the ranks into workers and servers, loaded by each of a smaller group."""
    rank, size = comm.Get_rank(), comm.Get_size()
    path = os.path.join(comm.bcast(str(tmp_path)), "states")

    def start(store, values):
        for key, shape in SHAPES.items():
            store.init(key, full(2, shape) if values is None else values[key])
        store.set_optimizer(MAKERS[name]())

    def whole(store):
        start(store, None)
        middle = rounds(store, 0, 2)
        store.save_optimizer_states(path, dump_optimizer=True)
        return middle, {key: value.tobytes() for key, value in rounds(store, 2, 4).items()}

    groups = [(comm.Split(0 if rank < n else 1), n) for n in sorted({1, size - 1, size} - {0})]
    for servers in range(size):
        middle, expected = on_workers(comm, "dist_sync", whole, num_servers=servers, bigarray_bound_elems=BOUND)[0]

        def second_half(store, values=middle):
            start(store, values)
            store.load_optimizer_states(path)
            return {key: value.tobytes() for key, value in rounds(store, 2, 4).items()}

        for group, n in groups:
            if rank < n:
                fewer = min(1, n - 1)
                options = {"num_servers": fewer, "bigarray_bound_elems": BOUND + 1}
                assert on_workers(group, "dist_sync", second_half, **options) == [expected] * (n - fewer)
        comm.Barrier()
    for group, _ in groups:
        group.Free()
    if rank == 0:
        assert os.listdir(os.path.dirname(path)) == ["states"]


@pytest.mark.mpi
def test_a_damaged_file_is_an_error_on_every_worker_and_changes_nothing(comm, tmp_path):
    directory = comm.bcast(str(tmp_path))
    path = os.path.join(directory, "states")
    for name, servers in modes(comm):

        def body(store, synchronous=name == "dist_sync"):
            store.init("w", full(0, 30))
            store.set_optimizer(optimizers.create("sgd", learning_rate=1.0, momentum=0.5))
            if store.rank == 0 or synchronous:
                store.push("w", full(store.rank == 0, 30))
            store.save_optimizer_states(path)
            if store.rank == 0:
                with open(path, "rb") as file:
                    data = file.read()
                with open(path, "wb") as file:
                    file.write(data[: len(data) // 2])
            for wrong, kind in ((path, StatesFileError), (os.path.join(directory, "none"), FileNotFoundError)):
                with pytest.raises(kind) as caught:
                    store.load_optimizer_states(wrong)
                assert wrong in str(caught.value)
            with pytest.raises(FileNotFoundError):
                store.save_optimizer_states(os.path.join(directory, "none", "states"))
            if store.rank == 0 or synchronous:
                store.push("w", full(store.rank == 0, 30))
            store.barrier()
            return np.unique(store.pull("w")).tolist()

        found = on_workers(comm, name, body, num_servers=servers, bigarray_bound_elems=BOUND)
        assert found == [[-2.5]] * (comm.Get_size() - servers)


@pytest.mark.mpi
def test_asynchronous_states(comm, tmp_path):
    path = os.path.join(comm.bcast(str(tmp_path)), "states")
    servers = min(1, comm.Get_size() - 1)

    def save(store):
        store.init("w", full(0, 30))
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0, momentum=0.5))
        if store.rank == 0:
            store.push("w", full(1, 30))
        store.save_optimizer_states(path)
        return True

    def load(store):
        store.init("w", full(0, 30))
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0, momentum=0.5))
        store.load_optimizer_states(path)
        if store.rank == 0 or store.type == "dist_sync":
            store.push("w", full(0, 30))
        store.barrier()
        return np.unique(store.pull("w")).tolist()

    on_workers(comm, "dist_async", save, num_servers=servers, bigarray_bound_elems=BOUND)
    assert on_workers(comm, "dist_async", load) == [[-0.5]] * comm.Get_size()
    assert on_workers(comm, "dist_sync", load) == [[-0.5]] * comm.Get_size()
