"""The `_async` calls: requests, their order, what may be touched when, several rounds under way."""

from __future__ import annotations

import threading
import time
import weakref

import numpy as np
import pytest
from store_modes import FEW, FEW_ASYNC, FEW_DIST_SYNC, Mode, mode_id

from mpikv import MpikvError, Request, StallError, optimizers
from mpikv.spaces.host import HostSpace
from mpikv.transports import wire

EVERY_KIND = pytest.mark.parametrize("mode", FEW, ids=mode_id)
SYNC_KINDS = pytest.mark.parametrize("mode", [Mode("local", 1), *FEW_DIST_SYNC], ids=mode_id)
LARGE = 5000  # float32: above the thread transport's eager limit, so that a message is read only when received


def full(value, n=4):
    return np.full(n, value, np.float32)


@EVERY_KIND
def test_requests(mode):
    def body(store):
        store.set_optimizer(optimizers.create("test"))
        store.init(["a", "b"], [full(0), full(0)])
        pushed = store.push_async("a", full(1))
        assert isinstance(pushed, Request)
        assert pushed.wait() is None
        assert pushed.test()
        store.barrier()
        assert store.pull_async("a").wait().tolist() == [mode.workers] * 4
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
        return out.tolist(), listed.wait()[0].tolist(), store.pull("b").tolist()

    W = float(mode.workers)
    assert mode.run(body) == [([W] * 4, [W] * 4, [W] * 4)] * mode.workers


@SYNC_KINDS
def test_test_makes_progress_without_a_thread(mode):
    def body(store):
        store.init("a", full(0))
        request = store.pushpull_async("a", value := full(1))
        deadline = time.monotonic() + 10
        while not request.test():
            assert time.monotonic() < deadline, "test() alone must bring a request to its end"
        return value.tolist()

    assert mode.run(body, late=True, progress="calls") == [[float(mode.workers)] * 4] * mode.workers


@pytest.mark.grid
@EVERY_KIND
@pytest.mark.parametrize("n", [4, LARGE])
def test_a_pushed_value_may_be_changed_at_once(mode, n):
    """Blocking push; the same for the value of init."""

    def body(store):
        store.set_optimizer(optimizers.create("test"))
        value = full(3, n)
        store.init("a", value)
        value[:] = 100
        store.barrier()
        for _ in range(3):
            value[:] = 1
            store.push("a", value)
            value[:] = -50
        store.barrier()
        return np.unique(store.pull("a")).tolist()

    assert mode.run(body) == [[3.0 + 3 * mode.workers]] * mode.workers


@SYNC_KINDS
def test_pulled_arrays_are_the_callers_own(mode):
    def body(store):
        store.init("a", full(1))
        first, second = store.pull("a"), store.pull("a")
        first[:] = 7
        store.pull("a", out := full(0))
        out[:] = 8
        return second.tolist(), store.pull("a").tolist()

    assert mode.run(body) == [([1.0] * 4, [1.0] * 4)] * mode.workers


@SYNC_KINDS
@pytest.mark.parametrize("n", [4, LARGE])
def test_pull_is_of_the_round_of_the_last_push_before_it(mode, n):
    """Worker 0 is `ahead` rounds ahead of the others, with a pull after each push; so are all, one after another."""
    ahead = 5

    def body(store):
        store.set_optimizer(optimizers.create("test"))
        store.init("a", full(0, n))
        outs, requests = [], []
        for _ in range(ahead):
            store.push("a", full(1, n))
            outs.append(full(-1, n))
            requests.append(store.pull_async("a", outs[-1]))
        store.wait_all()
        assert all(request.test() for request in requests)
        return [np.unique(out).tolist() for out in outs]

    expected = [[float(mode.workers * (i + 1))] for i in range(ahead)]
    assert mode.run(body, late=True) == [expected] * mode.workers


@SYNC_KINDS
def test_pushpulls_under_way_in_one_key(mode):
    def body(store):
        store.set_optimizer(optimizers.create("test"))
        store.init("a", full(0))
        outs = [full(-1) for _ in range(6)]
        requests = [store.pushpull_async("a", full(1), out) for out in outs]
        for request in reversed(requests):
            request.wait()
        return [out.tolist() for out in outs]

    expected = [[float(mode.workers * (i + 1))] * 4 for i in range(6)]
    assert mode.run(body, late=True) == [expected] * mode.workers


@pytest.mark.parametrize(
    "mode", [mode for mode in FEW if mode.name.startswith("dist") and not mode.device], ids=mode_id
)
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
        in_place = len(copied) - before
        store.barrier()
        store.pushpull_async("b", full(2), elsewhere := full(0)).wait()
        store.barrier()
        return [set(value.tolist()) for value in values], in_place, len(copied) - before > 0, elsewhere[0]

    found = mode.run(body)
    W = mode.workers
    if mode.synchronous:
        assert [one[0] for one in found] == [[{1.0 * W}, {2.0 * W}, {3.0 * W}]] * W
        assert [one[3] for one in found] == [4.0 * W] * W
    assert [one[1:3] for one in found] == [(0, True)] * W


@pytest.mark.parametrize("mode", [*FEW_DIST_SYNC, *FEW_ASYNC], ids=mode_id)
def test_close_finishes_what_is_under_way(mode):
    def body(store):
        store.set_optimizer(optimizers.create("test"))
        store.init("a", full(0, LARGE))
        out = full(-1, LARGE)
        request = store.pushpull_async("a", full(1, LARGE), out)
        store.close()
        try:
            request.wait()
        except MpikvError:
            return "error"
        return np.unique(out).tolist()

    for found in mode.run(body, late=True):
        # An asynchronous pushpull may see any number of the pushes, its own among them.
        assert found == [float(mode.workers)] if mode.synchronous else 1 <= found[0] <= mode.workers


def test_a_wait_with_a_limit_of_its_own():
    def body(store):
        store.init("a", full(0))
        if store.rank == 0:
            request = store.pushpull_async("a", value := full(1))
            with pytest.raises(StallError, match=r"0\.05 s.*'a'.*round 1"):
                request.wait(timeout_s=0.05)
            assert not request.test()
            store.barrier()
            request.wait()
            return value.tolist()
        store.barrier()
        store.pushpull("a", value := full(1))
        return value.tolist()

    for mode in (Mode("dist_sync", 2), Mode("dist_sync", 2, 1)):
        assert mode.run(body) == [[2.0] * 4] * 2


def test_more_pulls_under_way_than_reply_tags(monkeypatch):
    monkeypatch.setattr(wire, "REPLY_TAGS", 16)

    def body(store):
        store.init(["a", "b"], [full(3, 1), full(4, 20)])
        requests = [store.pull_async(["a", "b"]) for _ in range(100)]
        store.wait_all()
        return {(float(a[0]), float(b[-1])) for a, b in (request.wait() for request in requests)}

    assert Mode("dist_sync", 2, 3).run(body) == [{(3.0, 4.0)}] * 2


@pytest.mark.parametrize("mode", [mode for mode in FEW_DIST_SYNC if mode.workers > 1 and not mode.device], ids=mode_id)
def test_results_of_two_calls_do_not_come_to_one_array(mode):
    told = threading.Event()

    def body(store):
        store.init(["a", "b", "none"], [full(0), full(0), full(0)[:0]])
        value = full(1)
        if store.rank:
            assert told.wait(60)
            first = store.pushpull_async("a", value)
        else:
            first = store.pushpull_async("a", value)
            for second in (value, [value], value[:], value[:2]):
                with pytest.raises(ValueError, match="result of an earlier call is still to come to its array"):
                    store.pushpull_async("b" if isinstance(second, np.ndarray) else ["b"], second)
            store.pushpull_async("none", value[:0])  # no part of it is
            told.set()
        if store.rank:
            store.pushpull_async("none", value[:0])
        first.wait()
        store.pushpull_async("b", value).wait()  # the array is free again
        return value.tolist()

    assert mode.run(body) == [[mode.workers**2] * 4] * mode.workers


@pytest.mark.parametrize("mode", [mode for mode in FEW_DIST_SYNC if mode.workers > 1 and not mode.device], ids=mode_id)
def test_arrays_of_a_list_are_held_until_its_last_key_is_done(mode):
    """Else the id of one that is gone could be that of another call's array, which would then be refused."""
    looked = threading.Event()

    def body(store):
        store.init(["a", "b"], [full(0), full(0)])
        if store.rank:
            store.pushpull("a", full(1))
            assert looked.wait(60)
            store.pushpull("b", full(1))
            return True
        first = full(1)
        held = weakref.ref(first)
        request = store.pushpull_async(["a", "b"], [first, full(1)])
        del first
        store.pull("a")
        early = request.test()
        alive = held() is not None
        looked.set()
        request.wait()
        return not early and alive

    assert mode.run(body) == [True] * mode.workers
