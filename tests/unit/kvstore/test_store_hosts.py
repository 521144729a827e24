"""Stores over several hosts with several workers on them: through the hosts' memory the bits are those of messages."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
from direct_stores import numbers
from on_workers import on
from store_modes import Mode

from mpikv import Parameter, Trainer, optimizers
from mpikv.errors import MpikvError, StallError

F32 = np.float32
LAYOUTS = ("aab", "aabb", "abab", "aaab", "aabbc")
HOSTS = pytest.mark.parametrize("hosts", LAYOUTS)
LARGE = 200_000


def both_ways(hosts, body):
    """What `body(store)` returns, the same with messages; checks which way it was."""
    results = []
    for memory in ("auto", "off"):

        def counted(store, through_memory=memory == "auto"):
            found = body(store)
            assert (store.stats().get("shared_bytes", 0) > 0) == through_memory
            return found

        results.append(Mode("dist_sync", len(hosts), hosts=hosts, memory=memory).run(counted))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.grid(1)
@HOSTS
@pytest.mark.parametrize("n", [5, LARGE])
def test_arrays_of_empty(hosts, n):
    def body(store):
        arrays = store.zeros([(n,), (2, n)])
        other = store.empty(n, "float64")
        store.init(["a", "b", "c"], [arrays[0], arrays[1], np.zeros(n)])
        assert all(not array.any() for array in arrays)
        found = []
        for seed in range(3):
            arrays[0][:] = numbers(store, n, seed)
            arrays[1][:] = numbers(store, 2 * n, seed).reshape(2, n)
            store.pushpull(["a", "b"], arrays)
            other[:] = numbers(store, n, seed, np.float64)
            plain = np.empty(n)
            store.pushpull("c", other, plain)
            found += [array.tobytes() for array in (*arrays, other, plain)]
            if store.rank % 2:  # another array on some workers, an ordinary one
                store.pushpull("a", numbers(store, n, seed))
            else:
                store.pushpull("a", arrays[0])
            found.append(store.pull("a").tobytes())
            arrays[0][:] = -1  # the store's value is not this array
            found.append(store.pull("a").tobytes())
        return found

    both_ways(hosts, body)


@HOSTS
@pytest.mark.parametrize("optimizer", [optimizers.Adam, optimizers.LARS])
def test_optimizers(hosts, optimizer):
    """Elementwise, and of the whole key, which then has one owner."""

    def body(store):
        n = 30_001
        store.init([1, 2, 3], [np.ones(n, F32), np.ones(3, F32), np.ones(5, np.float16)])
        store.pushpull(2, numbers(store, 3))
        store.set_optimizer(optimizer())
        found = []
        for seed in range(3):
            values = [numbers(store, n, seed), numbers(store, 3, seed), numbers(store, 5, seed, np.float16)]
            store.pushpull([1, 2, 3], values)
            found += [value.tobytes() for value in values]
            store.push(1, numbers(store, n, seed))
            found.append(store.pull(1).tobytes())
        return found

    results = both_ways(hosts, body)
    assert results == [results[0]] * len(hosts)


@pytest.mark.parametrize("hosts", ["aabb", "aab"])
@pytest.mark.parametrize("on_store", [True, False])
def test_buckets_of_a_trainer(hosts, on_store):
    def body(store):
        params = [Parameter(np.ones(31 * i, F32), f"p{i}") for i in range(40)] + [
            Parameter(np.ones(LARGE, F32), "large")
        ]
        trainer = Trainer(params, "adam", {"learning_rate": 0.1}, kvstore=store, update_on_kvstore=on_store)
        for step in range(4):
            for i, param in reversed(list(enumerate(params))):
                param.grad[...] = numbers(store, param.grad.size, step)
                if (i + step + store.rank) % 2:
                    trainer.push_grad(param, 1)
            trainer.step(1)
        return [param.data.tobytes() for param in params]

    results = both_ways(hosts, body)
    assert results == [results[0]] * len(hosts)


@pytest.mark.parametrize("late", [0, 3])
@on(Mode("dist_sync", 4, hosts="aabb"), timeout_s=3.0)
def test_who_does_not_come_is_named(store, late):
    store.init("w", np.zeros(LARGE, F32))
    with pytest.raises(StallError) as caught:  # the barrier is one that the others never come to
        store.barrier() if store.rank == late else store.pushpull("w", np.ones(LARGE, F32))
    if store.rank != late:
        assert re.search(rf"(Not arrived|Out of reach): [^.]*worker {late} on ", str(caught.value))
    with contextlib.suppress(MpikvError):
        store.close()


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


def test_memory_that_is_too_small(monkeypatch):
    """What has no place in it goes by messages, and `empty` gives ordinary arrays; the rest is as before."""
    monkeypatch.setattr("mpikv.hostmemory.segment.memory_size_bytes", lambda: 1 << 18)

    def body(store):
        store.init(["small", "large", "last"], [np.zeros(10, F32), np.zeros(LARGE, F32), np.zeros(20, F32)])
        arrays = [store.zeros(10), store.zeros(LARGE), store.zeros(20)]
        found = []
        for seed in range(2):
            for array in arrays:
                array[:] = numbers(store, array.size, seed)
            store.pushpull(["small", "large", "last"], arrays)
            found += [array.tobytes() for array in arrays]
        if store.stats().get("shared_bytes"):
            assert store.stats()["shared_bytes"] == 30 * 4
        return found

    results = both_ways("aabb", body)
    assert results == [results[0]] * 4
