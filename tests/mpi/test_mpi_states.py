"""Optimizer states saved by one number of workers and servers and loaded by another, between processes."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mpi_stores import full, on_workers

from mpikv import optimizers

SHAPES = {"s": (), "a": (7,), "b": (13, 9)}
BOUND = 10


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
def test_goes_on_with_other_numbers(comm, tmp_path):
    """Saved by each split of the ranks into workers and servers, loaded by each of a smaller group."""
    rank, size = comm.Get_rank(), comm.Get_size()
    path = os.path.join(comm.bcast(str(tmp_path)), "states")

    def start(store, values):
        for key, shape in SHAPES.items():
            store.init(key, full(2, shape) if values is None else values[key])
        store.set_optimizer(optimizers.SGD(learning_rate=0.25, momentum=0.5))

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
