"""Stores over several hosts with several workers on them: through the hosts' memory the bits are those of messages."""

from __future__ import annotations

import re

import numpy as np
import pytest
from direct_stores import bits, numbers
from on_workers import on, taken_of
from store_modes import Mode

from mpikv import Parameter, Trainer, optimizers
from mpikv.errors import StallError
from mpikv.testing.ranks import RankError

F32 = np.float32
LAYOUTS = ("aab", "aabb", "abab", "aaab", "aabbc")
LARGE = 200_000


def alike_on(*layouts):
    """Make a test of what a worker yields: the same on all of them, through their hosts' memory and by messages."""

    def run(worker, given):
        results = []
        for memory in ("auto", "off"):

            def counted(store, through_memory=memory == "auto"):
                found = [bits(one) for one in worker(store)]
                assert (store.stats().get("shared_bytes", 0) > 0) == through_memory
                return found

            results += Mode("dist_sync", len(given["hosts"]), hosts=given["hosts"], memory=memory).run(counted)
        assert results == [results[0]] * len(results)

    return lambda body: pytest.mark.parametrize("hosts", layouts)(taken_of(body, run, "hosts"))


@pytest.mark.grid(1)
@alike_on(*LAYOUTS)
@pytest.mark.parametrize("n", [5, LARGE])
def test_arrays_of_empty(store, n):
    arrays = store.zeros([(n,), (2, n)])
    other = store.empty(n, "float64")
    store.init(["a", "b", "c"], [arrays[0], arrays[1], np.zeros(n)])
    assert all(not array.any() for array in arrays)
    for seed in range(3):
        arrays[0][:] = numbers(store, n, seed)
        arrays[1][:] = numbers(store, 2 * n, seed).reshape(2, n)
        store.pushpull(["a", "b"], arrays)
        other[:] = numbers(store, n, seed, np.float64)
        store.pushpull("c", other, plain := np.empty(n))
        assert bits(other) == bits(numbers(store, n, seed, np.float64))
        yield arrays, plain
        # Another array on some workers, an ordinary one.
        store.pushpull("a", numbers(store, n, seed) if store.rank % 2 else arrays[0])
        yield store.pull("a")
        arrays[0][:] = -1  # the store's value is not this array
        yield store.pull("a")


@alike_on(*LAYOUTS)
@pytest.mark.parametrize("optimizer", [optimizers.Adam, optimizers.LARS])
def test_optimizers(store, optimizer):
    """Elementwise, and of the whole key, which then has one owner."""
    n = 30_001
    store.init([1, 2, 3], [np.ones(n, F32), np.ones(3, F32), np.ones(5, np.float16)])
    store.pushpull(2, numbers(store, 3))
    store.set_optimizer(optimizer())
    for seed in range(3):
        values = [numbers(store, n, seed), numbers(store, 3, seed), numbers(store, 5, seed, np.float16)]
        store.pushpull([1, 2, 3], values)
        yield values
        store.push(1, numbers(store, n, seed))
        yield store.pull(1)


@alike_on("aabb", "aab")
@pytest.mark.parametrize("on_store", [True, False])
def test_buckets_of_a_trainer(store, on_store):
    params = [Parameter(np.ones(n, F32), f"p{n}") for n in (*range(0, 31 * 40, 31), LARGE)]
    trainer = Trainer(params, "adam", {"learning_rate": 0.1}, kvstore=store, update_on_kvstore=on_store)
    for step in range(4):
        for i, param in reversed(list(enumerate(params))):
            param.grad[...] = numbers(store, param.grad.size, step)
            if (i + step + store.rank) % 2:
                trainer.push_grad(param, 1)
        trainer.step(1)
    yield [param.data for param in params]


@pytest.mark.parametrize("late", [0, 3])
def test_who_does_not_come_is_named(late):
    def body(store):
        store.init("w", np.zeros(LARGE, F32))
        if store.rank == late:
            store.barrier()  # which the others never come to
        store.pushpull("w", np.ones(LARGE, F32))

    with pytest.raises(RankError) as caught:
        Mode("dist_sync", 4, hosts="aabb").run(body, timeout_s=3.0)
    for rank, error in caught.value.errors.items():
        assert isinstance(error, StallError)
        if rank != late:
            assert re.search(rf"(Not arrived|Out of reach): [^.]*worker {late} on ", str(error)), error


@on(Mode("dist_sync", 4, hosts="aabb"))
def test_what_is_held(store):
    """Two values of a rank at most, of which others read one; the result once for the host."""
    value = np.ones(LARGE, F32)
    store.init("w", value)
    assert store.stats()["held_bytes"] == 0
    for array in (value, store.zeros(LARGE)):
        store.pushpull("w", array)
        assert store.stats()["held_bytes"] == 4 * LARGE
    assert store.stats()["shared_bytes"] == 4 * LARGE


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr("mpikv.hostmemory.segment.memory_size_bytes", lambda: 1 << 18)


@pytest.mark.usefixtures("little_memory")
@alike_on("aabb")
def test_memory_that_is_too_small(store):
    """What has no place in it goes by messages, and `empty` gives ordinary arrays; the rest is as before."""
    store.init(["small", "large", "last"], [np.zeros(10, F32), np.zeros(LARGE, F32), np.zeros(20, F32)])
    arrays = [store.zeros(10), store.zeros(LARGE), store.zeros(20)]
    for seed in range(2):
        for array in arrays:
            array[:] = numbers(store, array.size, seed)
        store.pushpull(["small", "large", "last"], arrays)
        yield arrays
    assert store.stats().get("shared_bytes") in (None, 0, 30 * 4)
