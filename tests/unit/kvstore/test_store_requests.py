"""The `_async` calls: requests, their order, what may be touched when, several rounds under way."""

from __future__ import annotations

import time
import weakref

import numpy as np
import pytest
from on_workers import full, on, uniform
from store_modes import FEW, FEW_ASYNC, FEW_DIST_SYNC, Mode

from mpikv import Request, StallError, optimizers
from mpikv.spaces.host import HostSpace
from mpikv.transports import wire

EVERY_KIND = on(*FEW)
SYNC_KINDS = on(Mode("local", 1), *FEW_DIST_SYNC)
LARGE = 5000  # float32: above the thread transport's eager limit, so that a message is read only when received


@EVERY_KIND
def test_requests(store, W):
    store.set_optimizer(optimizers.create("test"))
    store.init(["a", "b"], [full(0), full(0)])
    pushed = store.push_async("a", full(1))
    assert isinstance(pushed, Request)
    assert pushed.wait() is None
    assert pushed.test()
    store.barrier()
    assert store.pull_async("a").wait().tolist() == [W] * 4
    out = full(9)
    assert store.pull_async("a", out).wait() is None
    value = full(1)
    both = store.pushpull_async("b", value)
    deadline = time.monotonic() + 10
    while not both.test():
        assert time.monotonic() < deadline
    assert both.wait(timeout_s=1) is None
    listed = store.pull_async(["a", "b"])
    store.wait_all()
    assert listed.test()
    store.barrier()
    assert uniform([out, listed.wait()[0], store.pull("b")]) == W


@on(Mode("local", 1), *FEW_DIST_SYNC, late=True, progress="calls")
def test_test_makes_progress_without_a_thread(store, W):
    store.init("a", full(0))
    request = store.pushpull_async("a", value := full(1))
    deadline = time.monotonic() + 10
    while not request.test():
        assert time.monotonic() < deadline, "test() alone must bring a request to its end"
    assert value.tolist() == [float(W)] * 4


@SYNC_KINDS
def test_pulled_arrays_are_the_callers_own(store):
    store.init("a", full(1))
    first, second = store.pull("a"), store.pull("a")
    first[:] = 7
    store.pull("a", out := full(0))
    out[:] = 8
    assert (second.tolist(), store.pull("a").tolist()) == ([1.0] * 4, [1.0] * 4)


@on(Mode("local", 1), *FEW_DIST_SYNC, late=True)
@pytest.mark.parametrize("n", [4, LARGE])
@pytest.mark.parametrize("together", [False, True], ids=["push, pull", "pushpull"])
def test_a_result_is_of_the_round_of_the_last_push_before_it(store, W, n, together):
    """All push rounds ahead of what they have pulled, one after another; the last request is waited for first."""
    store.set_optimizer(optimizers.create("test"))
    store.init("a", full(0, n))
    outs, requests = [full(-1, n) for _ in range(6)], []
    for out in outs:
        if together:
            requests.append(store.pushpull_async("a", full(1, n), out))
        else:
            store.push("a", full(1, n))
            requests.append(store.pull_async("a", out))
    for request in reversed(requests) if together else ():
        request.wait()
    store.wait_all()
    assert all(request.test() for request in requests)
    assert [uniform(out) for out in outs] == [W * (i + 1) for i in range(6)]


@on(*[mode for mode in FEW if mode.name.startswith("dist") and not mode.device])
def test_a_result_in_place_of_the_value_is_made_there(mode, monkeypatch):
    """Without a copy of what is pushed, of one key and of several; the result is also right where others are copied."""
    copied, total = [], HostSpace.total

    def counting(self, arrays, what, **options):
        copied.append(what)
        return total(self, arrays, what, **options)

    monkeypatch.setattr(HostSpace, "total", counting)

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


@on(*FEW_DIST_SYNC, *FEW_ASYNC, late=True)
def test_close_finishes_what_is_under_way(store, mode, W):
    store.set_optimizer(optimizers.create("test"))
    store.init("a", full(0, LARGE))
    request = store.pushpull_async("a", full(1, LARGE), out := full(-1, LARGE))
    store.close()
    request.wait()
    # An asynchronous pushpull may see any number of the pushes, its own among them.
    assert set(np.unique(out)) <= ({W} if mode.synchronous else set(range(1, W + 1)))


@on(Mode("dist_sync", 2), Mode("dist_sync", 2, 1))
def test_a_wait_with_a_limit_of_its_own(store):
    store.init("a", full(0))
    if store.rank == 0:
        request = store.pushpull_async("a", value := full(1))
        with pytest.raises(StallError, match=r"0\.05 s.*'a'.*round 1"):
            request.wait(timeout_s=0.05)
        assert not request.test()
        store.barrier()
        request.wait()
    else:
        store.barrier()
        store.pushpull("a", value := full(1))
    assert value.tolist() == [2.0] * 4


@pytest.fixture
def few_tags(monkeypatch):
    monkeypatch.setattr(wire, "REPLY_TAGS", 16)


@on(Mode("dist_sync", 2, 3))
@pytest.mark.usefixtures("few_tags")
def test_more_pulls_under_way_than_reply_tags(store):
    store.init(["a", "b"], [full(3, 1), full(4, 20)])
    requests = [store.pull_async(["a", "b"]) for _ in range(100)]
    store.wait_all()
    assert {(float(a[0]), float(b[-1])) for a, b in (request.wait() for request in requests)} == {(3.0, 4.0)}


SEVERAL = on(*[mode for mode in FEW_DIST_SYNC if mode.workers > 1 and not mode.device])


@SEVERAL
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


@SEVERAL
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
