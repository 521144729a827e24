"""Shared memory between processes: the bits of messages, no messages, whatever the calls look like."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
from mpi_stores import full, on_workers, uniform

from mpikv import Config, ShapeMismatch, kv, optimizers
from mpikv.hostmemory.common_calls import CommonCalls

LARGE = 150_001


@pytest.fixture
def patient(monkeypatch):
    """Nobody gives up waiting for the others because another rank gets no processor for long."""
    monkeypatch.setattr("mpikv.strategies.direct.CommonCalls", partial(CommonCalls, wait_s=30.0))


def numbers(rank, n, seed):
    """Values whose sum shows the order of adding."""
    random = np.random.default_rng([rank, n, seed])
    return (random.standard_normal(n) * 10.0 ** random.integers(-2, 3, n)).astype(np.float32)


def in_rank_order(size, n, seed):
    total = numbers(0, n, seed)
    for rank in range(1, size):
        total = total + numbers(rank, n, seed)
    return total


@pytest.mark.mpi
@pytest.mark.parametrize("shared", [False, True])
def test_sums_are_those_in_rank_order(comm, shared):
    sizes, size = (1, 1000, 5000, LARGE), comm.Get_size()

    def body(store):
        keys = [str(n) for n in sizes]
        store.init(keys, [np.zeros(n, np.float32) for n in sizes])
        arrays = store.zeros([(n,) for n in sizes]) if shared else [np.zeros(n, np.float32) for n in sizes]
        wrong = []
        for step in range(4):
            for array in arrays:
                array[:] = numbers(store.rank, array.size, step)
            if step == 3:
                for key, array in zip(keys, arrays, strict=True):
                    store.pushpull(key, array)
            else:
                store.pushpull(keys, arrays)
            pulled = store.pull(keys)
            for key, array, found in zip(keys, arrays, pulled, strict=True):
                bits = in_rank_order(size, array.size, step).tobytes()
                wrong += [
                    (step, key, what) for what, one in (("array", array), ("pull", found)) if one.tobytes() != bits
                ]
        return wrong

    assert on_workers(comm, "dist_sync", body) == [[]] * size


@pytest.mark.mpi(min_size=2)
def test_workers_in_different_calls(comm):
    """Who lists, who goes key by key, who does not wait: the same bits as with messages only, and no deadlock."""

    def body(store):
        keys, sizes = list("abc"), (3, 2000, LARGE)
        store.init(keys, [full(0.5, n) for n in sizes])
        store.set_optimizer(optimizers.create("sgd", learning_rate=0.01, momentum=0.9))
        shared, own = store.zeros([(n,) for n in sizes]), [full(0, n) for n in sizes]
        found = []
        for step in range(8):
            values = shared if step % 4 < 2 else own
            for i, value in enumerate(values):
                value[:] = numbers(store.rank, value.size, step * 3 + i)
            form = (step // 2 + store.rank) % 4 if step % 2 else 0
            if form == 0:
                store.pushpull(keys, values)
            elif form == 1:
                for key, value in zip(keys, values, strict=True):
                    store.pushpull(key, value)
            elif form == 2:
                store.push(keys, values)
                store.pull(keys, values)
            else:
                requests = [store.pushpull_async(key, value) for key, value in zip(keys, values, strict=True)]
                for request in requests:
                    request.wait()
            found += [value.tobytes() for value in values]
        store.set_optimizer(optimizers.create("test"))
        store.pushpull(keys, own)
        return [*found, *(value.tobytes() for value in own)]

    messages = on_workers(comm, "dist_sync", body, algorithm="naive")  # the one that adds in the same order
    assert on_workers(comm, "dist_sync", body) == messages
    assert messages == [messages[0]] * comm.Get_size()


@pytest.mark.mpi
def test_slow_ranks(comm):
    """Each rank comes late now and then, also later than the others' patience."""

    def body(store):
        store.init(["a", "b"], [full(0, 3), full(0, LARGE)])
        naps = np.random.default_rng(store.rank)
        values = [full(0, 3), store.zeros(LARGE)]
        found = []
        for step in range(12):
            time.sleep(float(naps.choice([0, 0, 0.001, 0.02])))
            if step == 6 and store.rank == store.num_workers - 1:
                time.sleep(0.4)
            for value in values:
                value[:] = step + store.rank
            if step % 3:
                store.pushpull(["a", "b"], values)
            else:
                store.pushpull("a", values[0])
                store.pushpull("b", values[1])
            found.append([uniform(value) for value in values])
        return found

    W = comm.Get_size()
    expected = [[float(step * W + W * (W - 1) // 2)] * 2 for step in range(12)]
    assert on_workers(comm, "dist_sync", body) == [expected] * W


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
def test_several_stores(comm):
    """Two over all ranks and one over each half, their calls nested; each has memory of its own."""
    size, rank = comm.Get_size(), comm.Get_rank()
    half = comm.Split(rank % 2, rank)
    config = Config(timeout_s=30.0)
    stores = [kv.create("dist_sync", comm=one, config=config) for one in (comm, comm, half)]
    arrays = [store.zeros(3000) for store in stores]
    for store in stores:
        store.init("w", full(0, 3000))
    for step in range(5):
        for i, (store, array) in enumerate(zip(stores, arrays, strict=True)):
            array[:] = (step + 1) * 10**i
            store.pushpull("w", array)
        # An array of another store's memory is an ordinary one.
        other = stores[1].zeros(3000)
        other[:] = 1
        stores[0].pushpull("w", other)
        assert uniform(other) == size
        sizes = [size, size, half.Get_size()]
        assert [uniform(array) for array in arrays] == [float(sizes[i] * (step + 1) * 10**i) for i in range(3)]
    assert uniform(stores[0].pull("w")) == size
    for store in stores:
        store.close()
    assert [uniform(array) for array in arrays] == [float(sizes[i] * 5 * 10**i) for i in range(3)]  # still there
    half.Free()


@pytest.mark.mpi
def test_empty(comm):
    size = comm.Get_size()

    def body(store):
        for shape, kind in ((-1, ValueError), ("3", TypeError), ((2, 1.5), TypeError)):
            with pytest.raises(kind):
                store.empty(shape)
        if size > 1:
            with pytest.raises(ShapeMismatch, match=r"worker 0 on .*worker 1 on"):
                store.zeros(3 + (store.rank == 1))
        arrays = store.zeros([(2, 3), (0,), (1000,)], "int32")
        values = [array.tolist() for array in arrays]
        for array in arrays:
            array[...] = store.rank
        store.barrier()
        return [values == [[[0] * 3] * 2, [], [0] * 1000], int(arrays[0].max()), int(arrays[2].min())]

    assert on_workers(comm, "dist_sync", body) == [[True, rank, rank] for rank in range(size)]


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
