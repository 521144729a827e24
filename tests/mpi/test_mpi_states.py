"""Optimizer states saved by one number of workers and servers and loaded by another, between processes."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mpi_stores import full, on_workers

from mpikv import optimizers

KEYS = {"s": (), "a": (7,), "b": (13, 9)}


def start(store, values):
    for key, shape in KEYS.items():
        store.init(key, full(2, shape) if values is None else values[key])
    store.set_optimizer(optimizers.SGD(learning_rate=0.25, momentum=0.5))


def rounds(store, first, last):
    """Summed over the workers the gradients are the same integers for any number of them."""
    for round_ in range(first, last):
        for key, shape in KEYS.items():
            total = ((np.arange(np.prod(shape, dtype=int)) * 5 + round_) % 7 - 3).reshape(shape).astype(np.float32)
            store.push(key, total * (store.rank == 0))
    return {key: store.pull(key) for key in KEYS}


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
