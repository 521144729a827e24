"""Workers and messages that do not go in step: keys in different orders, one worker rounds ahead, late messages."""

from __future__ import annotations

import numpy as np
import pytest
from on_workers import full, on, uniform
from store_modes import BOUND, FEW_ASYNC, FEW_DIST_SYNC, Mode

from mpikv import KeyExists, KeyNotInitialized, PeerError, ShapeMismatch, optimizers

SYNC_KINDS = on(Mode("dist_sync", 2, 0, "naive"), Mode("dist_sync", 5, 0, "halving_doubling"), *FEW_DIST_SYNC)
ALL_KINDS = on(*FEW_DIST_SYNC, *FEW_ASYNC)
KEYS = list("abcdefg")
LARGE = 3000  # float32: above the thread transport's eager limit


def own_order(rank):
    return [str(key) for key in np.random.default_rng(100 + rank).permutation(KEYS)]


@pytest.mark.grid
@ALL_KINDS
@pytest.mark.parametrize("n", [4, LARGE])
def test_a_key_can_be_used_as_soon_as_its_own_init_returned(store, W, n):
    store.set_optimizer(optimizers.create("test"))
    for key in own_order(store.rank):
        store.init(key, full(ord(key) if store.rank == 0 else -1, n))
        store.push(key, full(1, n))
    store.barrier()
    assert [uniform(store.pull(key)) for key in KEYS] == [ord(key) + W for key in KEYS]


@ALL_KINDS
def test_lists_against_single_keys(store):
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
    assert [store.pull(key)[0] for key in KEYS] == [float(ord(key)) for key in KEYS]


@ALL_KINDS
def test_init_again_after_shapes_differed(store):
    with pytest.raises(ShapeMismatch):
        store.init(["a", "b"], [full(0, 2 + store.rank), full(1, 3)])
    with pytest.raises(KeyNotInitialized):
        store.pull("a")
    with pytest.raises(KeyExists):
        store.init(["c", "b"], [full(0), full(0, 3)])
    store.init(["a", "c"], [full(5, 2), full(6)])
    assert [store.pull(key).tolist() for key in "abc"] == [[5.0] * 2, [1.0] * 3, [6.0] * 4]


@pytest.mark.grid
@on(*FEW_DIST_SYNC, *FEW_ASYNC, timeout_s=3)
@pytest.mark.parametrize("n", [2, LARGE])
def test_shapes_that_differ_in_different_orders(store, W, n):
    """Every worker hears of it, at the latest at the key's next use, and the other key works."""
    store.set_optimizer(optimizers.create("test"))
    told = ""
    for key in ["good", "bad"] if store.rank == 0 else ["bad", "good"]:
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
    assert uniform(store.pull("good")) == W
    for part in ("'bad'", "worker 0 on localhost", "worker 1 on localhost", f"({n},)", f"({n + 1},)"):
        assert part in told


@on(Mode("dist_sync", 2), Mode("dist_sync", 2, 1), Mode("dist_async", 2), timeout_s=3)
@pytest.mark.parametrize("why", ["closed", "differs"])
def test_a_pull_under_way_of_a_key_that_breaks(store, why):
    """Worker 1's `init` has returned before worker 0 came to the key, and it never comes, or with another shape."""
    if store.rank == 0:
        store.init("b", full(0))
        if why == "differs":
            with pytest.raises(ShapeMismatch, match="'a'"):
                store.init("a", full(0, 5))
        return
    store.init("a", full(0))
    for pull in (lambda: store.pull("a"), lambda: store.pull_async("a").wait()):
        with pytest.raises(PeerError if why == "closed" else ShapeMismatch, match="'a'"):
            pull()
    if why == "differs":
        store.init("b", full(0))


@SYNC_KINDS
def test_a_worker_several_rounds_ahead(store, W):
    """Rounds count per worker: MXNet would close a round with two pushes of one worker."""
    store.init("a", full(0))
    for i in range(6):
        store.push("a", full(10**i))
        if store.rank or i == 5:
            assert uniform(store.pull("a")) == W * 10**i


@on(Mode("dist_sync", 2, 0, "naive"), Mode("dist_sync", 5, 0, "halving_doubling"), *FEW_DIST_SYNC, late=True)
def test_random_programs(store, W):
    """Every worker pushes the same rounds of the same keys, in an order and with pulls of its own."""
    numbers, pushed, seen = np.random.default_rng(store.rank + 40), dict.fromkeys(KEYS, 0), []
    store.set_optimizer(optimizers.create("test"))
    store.init(KEYS, [full(0, 5 * i + 1) for i in range(len(KEYS))])
    while left := [key for key in KEYS if pushed[key] < 4]:
        key = str(numbers.choice(left))
        n = 5 * KEYS.index(key) + 1
        pushed[key] += 1
        store.push_async(key, full(pushed[key], n))
        if numbers.random() < 0.4:
            seen.append((pushed[key], out := full(-1, n)))
            store.pull_async(key, out)
    store.wait_all()
    assert seen
    assert [uniform(out) for _, out in seen] == [W * round_ * (round_ + 1) / 2 for round_, _ in seen]


# --- on a network that keeps no more order than MPI promises


EVERY = on(*FEW_DIST_SYNC, *FEW_ASYNC, Mode("dist_sync", 4, 0, "halving_doubling"), Mode("dist_async", 3, 1))
N = 3 * BOUND


def long(value, n=N):
    return full(value, n)


@pytest.mark.grid
@EVERY
def test_after_a_barrier_every_push_before_it_counts(store, W, unruly):
    store.set_optimizer(optimizers.create("test"))
    store.init(["a", "b"], [long(0), long(0, 3)])
    for i in range(1, 7):
        store.push(["a", "b"], [long(1), long(2, 3)])
        store.barrier()
        assert [uniform(store.pull(key)) for key in "ab"] == [W * i, 2 * W * i]
        store.barrier()


@pytest.mark.grid
@EVERY
def test_optimizers_and_states_between_pushes(store, W, unruly, tmp_path):
    """Nothing that is pushed before or after a collective call slips to its other side."""
    store.init("w", long(0))
    expected = 0.0
    for rate in (1.0, 10.0, 100.0):
        optimizer = optimizers.create("sgd", learning_rate=rate)
        store.set_optimizer(optimizer)
        store.push("w", long(-1))
        optimizer.learning_rate = 2 * rate
        store.push("w", long(-1))
        store.save_optimizer_states(tmp_path / "states")
        expected += 3 * rate * W
        store.barrier()
        assert uniform(store.pull("w")) == expected
        store.barrier()


@pytest.mark.grid
@EVERY
def test_another_optimizer_begins_with_the_pushes_after_it(store, W, unruly):
    """Without a pull or a barrier before it."""
    store.init(["a", "b"], [long(0), long(0, 2000)])
    for rate in (1, 10, 100):
        store.set_optimizer(optimizers.create("test", rescale_grad=rate))
        for _ in range(3):
            store.push(["a", "b"], [long(1), long(1, 2000)])
    store.barrier()
    assert [uniform(store.pull(key)) for key in "ab"] == [333 * W] * 2
