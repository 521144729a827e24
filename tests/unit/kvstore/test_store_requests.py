"""`_async` calls and workers out of step, where the order of workers matters; test_store_paths.py has the rest."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from on_workers import full, on, uniform
from store_modes import BOUND, FEW_ASYNC, HYBRID, MESSAGES, ONE_HOST, SERVED, TWO_HOSTS, Mode

from mpikv import PeerError, ShapeMismatch, optimizers
from mpikv.spaces.base import Space

LARGE = 5000  # float32: above the thread transport's eager limit, so that a message is read only when received
SYNC = (ONE_HOST, MESSAGES, TWO_HOSTS, SERVED, *HYBRID[:2])


@pytest.mark.parametrize("mode", [*SYNC, FEW_ASYNC[0]])
def test_a_result_in_place_of_the_value_is_made_there(mode, monkeypatch):
    """Without a copy of what is pushed, of one key and of several; the result is also right where others are copied."""
    copied, total = [], Space.total

    def counting(self, arrays, what, **options):
        copied.append(what)
        return total(self, arrays, what, **options)

    monkeypatch.setattr(Space, "total", counting)

    def body(store):
        store.set_optimizer(optimizers.create("test"))
        keys, values = ["a", "b", "c"], [full(1, LARGE), full(2), full(3, 2 * LARGE)]
        store.init(keys, [np.zeros_like(value) for value in values])
        store.barrier()
        before = len(copied)
        store.pushpull_async("a", values[0]).wait()
        store.pushpull_async(keys[1:], values[1:]).wait()
        store.barrier()
        assert len(copied) == before
        store.barrier()
        store.pushpull_async("b", full(2), elsewhere := full(0)).wait()
        store.barrier()
        assert len(copied) > before
        if mode.synchronous:
            assert [uniform(one) / mode.workers for one in (*values, elsewhere)] == [1, 2, 3, 4]

    mode.run(body)


@on(*SYNC)
def test_results_of_two_calls_do_not_come_to_one_array(store, W, told):
    store.init(["a", "b", "none"], [full(0), full(0), full(0)[:0]])
    value = full(1)
    assert store.rank == 0 or told.wait(60)
    first = store.pushpull_async("a", value)
    if store.rank == 0:
        for second in (value, [value], value[:], value[:2]):
            with pytest.raises(ValueError, match="result of an earlier call is still to come to its array"):
                store.pushpull_async("b" if isinstance(second, np.ndarray) else ["b"], second)
    store.pushpull_async("none", value[:0])  # no part of it is
    told.set()
    first.wait()
    store.pushpull_async("b", value).wait()  # the array is free again
    assert value.tolist() == [W**2] * 4


@on(*SYNC)
def test_arrays_of_a_list_are_held_until_its_last_key_is_done(store, told):
    """Else the id of one that is gone could be that of another call's array, which would then be refused."""
    store.init(["a", "b"], [full(0), full(0)])
    if store.rank:
        store.pushpull("a", full(1))
        assert told.wait(60)
        store.pushpull("b", full(1))
        return
    first = full(1)
    held = weakref.ref(first)
    request = store.pushpull_async(["a", "b"], [first, full(1)])
    del first
    store.pull("a")
    assert not request.test()
    assert held() is not None
    told.set()
    request.wait()


@on(Mode("dist_sync", 2), SERVED, Mode("dist_async", 2))
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


@on(*SYNC, FEW_ASYNC[0], FEW_ASYNC[3], late=True)
def test_collective_calls_between_pushes(store, W, tmp_path):
    """On a network without order nothing that is pushed before or after one slips to its other side."""
    n, expected = 3 * BOUND, 0
    store.init(["a", "b"], [full(0, n), full(0, n + 2000)])
    for rate in (1, 10, 100):
        optimizer = optimizers.create("sgd", learning_rate=rate)
        store.set_optimizer(optimizer)
        store.push(["a", "b"], [full(-1, n), full(-2, n + 2000)])
        optimizer.learning_rate = 2 * rate
        store.push(["a", "b"], [full(-1, n), full(-2, n + 2000)])
        if rate > 1:
            store.save_optimizer_states(tmp_path / "states")
        expected += 3 * rate * W
        if rate < 100:
            continue  # the next optimizer comes without a pull or a barrier before it
        store.barrier()
        assert [uniform(store.pull(key)) for key in "ab"] == [expected, 2 * expected]
        store.barrier()
    for i in range(1, 5):
        store.push(["a", "b"], [full(-1, n), full(-2, n + 2000)])
        store.barrier()
        assert [uniform(store.pull(key)) for key in "ab"] == [expected + 200 * W * i, 2 * (expected + 200 * W * i)]
        store.barrier()


@on(Mode("dist_sync", 2, hosts="ab"))
def test_workers_in_opposite_orders_that_wait_for_one_key_before_they_push_the_next(store):
    """Key 0 fills every window of worker 0, and worker 1 does not push it before it has key 1."""
    n = 61_440  # two whole segments for each of two ranks
    values = [full(1, 60 * n), full(2, n)]
    store.init([0, 1], values)
    for key in (0, 1) if store.rank == 0 else (1, 0):
        store.push(key, values[key], priority=0 if key else 5)
        if store.rank == 1 or key == 1:
            assert uniform(store.pull(key)) == 2 + 2 * key
    assert uniform(store.pull(0)) == 2
