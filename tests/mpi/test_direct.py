"""Shared memory between processes: the bits of messages, no messages, whatever the calls look like."""

from __future__ import annotations

import time

import numpy as np
import pytest
from direct_stores import CALLS, exchange
from mpi_stores import full, numbers, on_workers

from mpikv import optimizers

LARGE = 150_001


@pytest.mark.mpi
@pytest.mark.parametrize("naps", [False, True])
def test_workers_in_different_calls(comm, naps):
    """The same bits as with messages only, and no deadlock; also where ranks come later than the others' patience."""

    def body(store):
        keys, sizes = list("abc"), (3, 2000, LARGE)
        store.init(keys, [full(0.5, n) for n in sizes])
        shared, own, outs = store.zeros([(n,) for n in sizes]), *([full(0, n) for n in sizes] for _ in range(2))
        random, found = np.random.default_rng(store.rank), []
        for step in range(10):
            if step == 4:
                store.set_optimizer(optimizers.create("sgd", learning_rate=0.01, momentum=0.9))
            values = shared if step % 4 < 2 else own
            for i, value in enumerate(values):
                value[:] = numbers(store.rank, value.size, step * 3 + i)
            if naps:
                time.sleep(0.4 if (step, store.rank) == (6, store.num_workers - 1) else float(random.choice([0, 0.02])))
            call = CALLS[(step // 2 + store.rank) % len(CALLS)] if step % 2 else "list"
            exchange(store, "async" if call == "singles" else call, keys, values, outs)
            found += [value.tobytes() for value in (*values, *store.pull(keys))]
        store.set_optimizer(optimizers.create("test"))
        store.pushpull(keys, own)
        return [*found, *(value.tobytes() for value in own)]

    messages = on_workers(comm, "dist_sync", body, algorithm="owners")  # which add in the same order
    assert on_workers(comm, "dist_sync", body) == messages
    assert messages == [messages[0]] * comm.Get_size()
