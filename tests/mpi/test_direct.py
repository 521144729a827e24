"""Shared memory between processes: the bits of messages, no messages, whatever the calls look like."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
from direct_stores import CALLS, exchange
from mpi_stores import full, numbers, on_workers, uniform

from mpikv import optimizers
from mpikv.hostmemory.common_calls import CommonCalls

LARGE = 150_001


@pytest.fixture
def patient(monkeypatch):
    """Nobody gives up waiting for the others because another rank gets no processor for long."""
    monkeypatch.setattr("mpikv.strategies.direct.CommonCalls", partial(CommonCalls, wait_s=30.0))


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

    messages = on_workers(comm, "dist_sync", body, algorithm="naive")  # the one that adds in the same order
    assert on_workers(comm, "dist_sync", body) == messages
    assert messages == [messages[0]] * comm.Get_size()


@pytest.mark.mpi(min_size=2)
def test_the_steady_state_sends_nothing(comm, patient):
    """n(p-1)/p bytes copied in and added and n copied out, in place n(p-1)/p of both, of each rank's part."""
    p = comm.Get_size()
    n = 65_536 * p  # a chunk for every rank, whole cache lines for every part
    names = ("messages_sent", "direct_calls", "bytes_copied", "bytes_added")

    def body(store):
        own, shared = np.zeros(n, np.float32), store.zeros(n)
        store.init(["own", "shared"], [own, own])
        found = []
        for key, array in (("own", own), ("shared", shared)):
            for _ in range(3):
                store.pushpull(key, array)
            store.barrier()
            before = store.stats()
            for _ in range(4):
                store.pushpull(key, array)
            after = store.stats()
            found.append([after[name] - before[name] for name in names])
            store.barrier()
        return found

    results = on_workers(comm, "dist_sync", body)
    n_bytes, added = 4 * n, sum(own[3] for own, _ in results) // 4
    assert added == n_bytes * (p - 1)  # all ranks together, once
    for own, shared in results:
        assert own[:2] == shared[:2] == [0, 4]
        # What goes in is all but the own part, which is 1/p of the chunks up to whole cache lines.
        assert abs(own[2] - 4 * (n_bytes * (p - 1) // p + n_bytes)) <= 4 * 64 * p
        assert abs(own[3] - 4 * n_bytes * (p - 1) // p) <= 4 * 64 * p * p
        assert shared[2:] == [4 * n_bytes * (p - 1) // p] * 2


@pytest.mark.mpi(min_size=2)
def test_no_direct_calls_between_pretended_hosts(comm):
    def body(store):
        x = store.zeros(100)
        x[:] = 1
        store.init("w", x)
        for _ in range(2):
            store.pushpull("w", x)
        return uniform(x), store.stats().get("direct_calls", 0)

    W = comm.Get_size()
    assert on_workers(comm, "dist_sync", body, test_hosts=2) == [(float(W * W), 0)] * W
