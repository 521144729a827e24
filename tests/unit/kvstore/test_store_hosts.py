"""Stores over several hosts with several workers on them: through the hosts' memory the bits are those of messages."""

from __future__ import annotations

import re

import numpy as np
import pytest
from direct_stores import numbers

from mpikv import Parameter, Trainer, optimizers
from mpikv.config import Config
from mpikv.errors import StallError
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import spawn_stores

F32 = np.float32
LAYOUTS = ("aab", "aabb", "abab", "aaab", "aabbc")
HOSTS = pytest.mark.parametrize("hosts", LAYOUTS)
LARGE = 200_000


def both_ways(hosts, body, *, through_memory=True):
    """What `body(store)` returns, the same with messages; checks which way it was."""

    def counted(store):
        return body(store), store.stats().get("shared_bytes", 0)

    changes = {"timeout_s": 20.0}
    shared = spawn_stores("dist_sync", len(hosts), counted, hosts=hosts, config=Config(**changes))
    messages = spawn_stores(
        "dist_sync", len(hosts), counted, hosts=hosts, config=Config(shared_memory="off", **changes)
    )
    assert [found for found, _ in shared] == [found for found, _ in messages]
    assert [n_bytes > 0 for _, n_bytes in shared] == [through_memory] * len(hosts)
    assert [n_bytes for _, n_bytes in messages] == [0] * len(hosts)
    return [found for found, _ in shared]


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
def test_who_does_not_come_is_named(late):
    def body(store):
        store.init("w", np.zeros(LARGE, F32))
        if store.rank == late:
            store.barrier()  # which the others never come to
        store.pushpull("w", np.ones(LARGE, F32))

    with pytest.raises(RankError) as caught:
        spawn_stores("dist_sync", 4, body, hosts="aabb", config=Config(timeout_s=3.0))
    for rank, error in caught.value.errors.items():
        assert isinstance(error, StallError)
        if rank != late:
            assert re.search(rf"(Not arrived|Out of reach): [^.]*worker {late} on ", str(error)), error


def test_what_is_held():
    """Two values of a rank at most, of which others read one; the result once for the host."""

    def body(store):
        value = np.ones(LARGE, F32)
        store.init("w", value)
        held = [store.stats()["held_bytes"]]
        for array in (value, store.zeros(LARGE)):
            store.pushpull("w", array)
            held.append(store.stats()["held_bytes"])
        return held, store.stats()["shared_bytes"]

    for held, shared in spawn_stores("dist_sync", 4, body, hosts="aabb", config=Config(timeout_s=20.0)):
        assert held == [0, 4 * LARGE, 4 * LARGE]
        assert shared == 4 * LARGE


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
