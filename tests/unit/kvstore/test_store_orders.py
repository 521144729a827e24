"""Workers that do not go in step: keys initialised and pushed in different orders, one worker rounds ahead."""

from __future__ import annotations

import time

import numpy as np
import pytest
from store_modes import FEW_ASYNC, FEW_DIST_SYNC, Mode, mode_id

from mpikv import KeyExists, KeyNotInitialized, PeerError, ShapeMismatch, optimizers

SYNC_KINDS = pytest.mark.parametrize(
    "mode",
    [Mode("dist_sync", 2, 0, "naive"), Mode("dist_sync", 5, 0, "halving_doubling"), *FEW_DIST_SYNC],
    ids=mode_id,
)
ALL_KINDS = pytest.mark.parametrize("mode", [*FEW_DIST_SYNC, *FEW_ASYNC], ids=mode_id)
KEYS = list("abcdefg")
LARGE = 3000  # float32: above the thread transport's eager limit


def full(value, n=4):
    return np.full(n, value, np.float32)


def own_order(rank):
    return [str(key) for key in np.random.default_rng(100 + rank).permutation(KEYS)]


@pytest.mark.grid
@ALL_KINDS
@pytest.mark.parametrize("n", [4, LARGE])
def test_a_key_can_be_used_as_soon_as_its_own_init_returned(mode, n):
    def body(store):
        store.set_optimizer(optimizers.create("test"))
        for key in own_order(store.rank):
            store.init(key, full(ord(key) if store.rank == 0 else -1, n))
            store.push(key, full(1, n))
        store.barrier()
        return [np.unique(store.pull(key)).tolist() for key in KEYS]

    assert mode.run(body) == [[[float(ord(key) + mode.workers)] for key in KEYS]] * mode.workers


@ALL_KINDS
def test_lists_against_single_keys(mode):
    def body(store):
        order = own_order(store.rank)
        if store.rank == 0:
            store.init(order, [full(ord(key)) for key in order])
        elif store.rank == 1:
            for key in order:
                store.init(key, full(0))
        else:
            store.init(order[:3], [full(0)] * 3)
            store.init(order[3:], [full(0)] * (len(KEYS) - 3))
        store.barrier()
        return [store.pull(key)[0] for key in KEYS]

    assert mode.run(body) == [[float(ord(key)) for key in KEYS]] * mode.workers


@pytest.mark.grid
@ALL_KINDS
@pytest.mark.parametrize("n", [2, LARGE])
def test_shapes_that_differ_in_different_orders(mode, n):
    """Every worker hears of it, at the latest at the key's next use, and the other key works."""

    def body(store):
        store.set_optimizer(optimizers.create("test"))
        keys = ["good", "bad"] if store.rank == 0 else ["bad", "good"]
        told = ""
        for key in keys:
            try:
                store.init(key, full(0, n + (store.rank == 1 and key == "bad")))
            except ShapeMismatch as error:
                told = str(error)
        store.push("good", full(1, n))
        store.barrier()
        if not told:
            with pytest.raises(ShapeMismatch) as caught:
                store.push("bad", full(1, n))
            told = str(caught.value)
        return np.unique(store.pull("good")).tolist(), told

    for value, told in mode.run(body, timeout_s=3):
        assert value == [mode.workers]
        assert "'bad'" in told
        assert "worker 0 on localhost" in told
        assert "worker 1 on localhost" in told
        assert f"({n},)" in told
        assert f"({n + 1},)" in told


@ALL_KINDS
def test_init_again_after_shapes_differed(mode):
    def body(store):
        with pytest.raises(ShapeMismatch):
            store.init(["a", "b"], [full(0, 2 + store.rank), full(1, 3)])
        with pytest.raises(KeyNotInitialized):
            store.pull("a")
        with pytest.raises(KeyExists):
            store.init(["c", "b"], [full(0), full(0, 3)])
        store.init(["a", "c"], [full(5, 2), full(6)])
        return [store.pull(key).tolist() for key in "abc"]

    assert mode.run(body) == [[[5.0] * 2, [1.0] * 3, [6.0] * 4]] * mode.workers


@pytest.mark.parametrize("mode", [Mode("dist_sync", 2), Mode("dist_sync", 2, 1), Mode("dist_async", 2)], ids=mode_id)
@pytest.mark.parametrize("why", ["closed", "differs"])
def test_a_pull_under_way_of_a_key_that_breaks(mode, why):
    """Worker 1's `init` has returned before worker 0 came to the key, and it never comes, or with another shape."""
    error = PeerError if why == "closed" else ShapeMismatch

    def body(store):
        if store.rank == 0:
            store.init("b", full(0))
            if why == "differs":
                with pytest.raises(ShapeMismatch, match="'a'"):
                    store.init("a", full(0, 5))
            return
        store.init("a", full(0))
        with pytest.raises(error, match="'a'"):
            store.pull("a")
        with pytest.raises(error, match="'a'"):
            store.pull_async("a").wait()
        if why == "differs":
            store.init("b", full(0))

    mode.run(body, timeout_s=3)


@SYNC_KINDS
def test_a_worker_several_rounds_ahead(mode):
    """Rounds count per worker: MXNet would close a round with two pushes of one worker."""
    rounds = 6

    def body(store):
        store.init("a", full(0))
        if store.rank == 0:
            for i in range(rounds):
                store.push("a", full(10**i))
            time.sleep(0.02)
            value = store.pull("a")
        else:
            for i in range(rounds):
                time.sleep(0.005 * store.rank)
                store.push("a", full(10**i))
                value = store.pull("a")
                assert value.tolist() == [float(mode.workers * 10**i)] * 4
        return value.tolist()

    assert mode.run(body) == [[float(mode.workers * 10 ** (rounds - 1))] * 4] * mode.workers


@SYNC_KINDS
def test_random_programs(mode):
    """Every worker pushes the same rounds of the same keys, in an order and with pulls and naps of its own."""
    rounds = 4

    def program(rank):
        numbers = np.random.default_rng(rank + 40)
        done = dict.fromkeys(KEYS, 0)
        while left := [key for key in KEYS if done[key] < rounds]:
            key = str(numbers.choice(left))
            done[key] += 1
            yield key, done[key], numbers.random()

    def body(store):
        store.set_optimizer(optimizers.create("test"))
        store.init(KEYS, [full(0, 5 * i + 1) for i in range(len(KEYS))])
        seen = []
        for key, round_, chance in program(store.rank):
            n = 5 * KEYS.index(key) + 1
            store.push_async(key, full(round_, n))
            if chance < 0.4:
                out = full(-1, n)
                store.pull_async(key, out)
                seen.append((key, round_, out))
            elif chance > 0.9:
                time.sleep(0.002)
        store.wait_all()
        return [(key, round_, np.unique(out).tolist()) for key, round_, out in seen]

    for seen in mode.run(body, late=True):
        assert seen
        for key, round_, found in seen:
            assert found == [mode.workers * round_ * (round_ + 1) / 2], (key, round_)


def test_the_number_of_workers_that_push_is_not_what_counts():
    """Two pushes of worker 0 and none of worker 1 are no round."""

    def body(store):
        store.init("a", full(0))
        if store.rank == 0:
            store.push("a", full(1))
            store.push("a", full(1))
        store.barrier()
        if store.rank == 1:
            store.push("a", full(5))
            found = store.pull("a").tolist()
            store.push("a", full(7))
            return found, store.pull("a").tolist()
        return store.pull("a").tolist()

    for mode in (Mode("dist_sync", 2), Mode("dist_sync", 2, 1)):
        assert mode.run(body) == [[8.0] * 4, ([6.0] * 4, [8.0] * 4)]
