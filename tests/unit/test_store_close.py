"""Waits that cannot end well: workers that do not come, close early, or push a key unequally often."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from store_modes import FEW, FEW_ASYNC, FEW_DIST_SYNC, Mode, mode_id

from mpikv import MpikvError, PeerError, StallError, optimizers
from mpikv.testing.ranks import RankError

SYNC_KINDS = pytest.mark.parametrize("mode", FEW_DIST_SYNC, ids=mode_id)
DIST = pytest.mark.parametrize("mode", [*FEW_DIST_SYNC, *FEW_ASYNC], ids=mode_id)
LIMIT_S = 0.4


def full(value, n=4):
    return np.full(n, value, np.float32)


def failing(mode, body, **changes):
    """The exceptions of the ranks that failed."""
    with pytest.raises(RankError) as caught:
        mode.run(body, **changes)
    return caught.value.errors


@SYNC_KINDS
@pytest.mark.parametrize("call", ["pull", "pushpull", "push_then_set_optimizer"])
def test_stall_says_who_waits_for_what_and_who_is_missing(mode, call):
    release = threading.Event()

    def body(store):
        store.init(["w", "other"], [full(0), full(0)])
        store.barrier()
        if store.rank == 1:
            release.wait(20)  # the program of worker 1 computes for long
            store.push("w", full(1))
            store.barrier()
            return
        try:
            with pytest.raises(StallError) as caught:
                if call == "pushpull":
                    store.pushpull("w", full(1))
                else:
                    store.push("w", full(1))
                    store.pull("w") if call == "pull" else store.set_optimizer(optimizers.create("test"))
        finally:
            if store.rank == 0:
                time.sleep(0.2 + LIMIT_S)  # worker 2 is to stall too
                release.set()
        text = str(caught.value)
        assert isinstance(caught.value, TimeoutError)
        parts = [f"worker {store.rank} on localhost (rank {store.rank} of {mode.workers + mode.servers})"]
        parts += [f"{LIMIT_S:g} s", "worker 1 on localhost", "outside the store"]
        if call != "push_then_set_optimizer" or not mode.servers:
            parts += ["'w'", "round 1", "pushed it 0 times"]
        for part in parts:
            assert part in text, (part, text)
        missing = text.split("Not arrived")[1].split("Arrived:")[0]
        if "pull" in call:
            assert "worker 2" not in missing
            assert "worker 0" not in missing
        store.barrier()

    if call == "push_then_set_optimizer" and mode.servers:
        pytest.skip("the servers hold the round; set_optimizer then waits for the other workers' calls")
    mode.run(body, timeout_s=LIMIT_S if call != "x" else 1)


@DIST
@pytest.mark.parametrize("call", ["barrier", "init", "set_optimizer"])
def test_stall_of_collective_calls(mode, call):
    release = threading.Event()

    def body(store):
        if store.rank == 1:
            release.wait(20)
            return
        calls = {
            "barrier": store.barrier,
            "init": lambda: store.init("w", full(0)),
            "set_optimizer": lambda: store.set_optimizer(optimizers.create("test")),
        }
        with pytest.raises(StallError) as caught:
            calls[call]()
        time.sleep(LIMIT_S)
        release.set()
        text = str(caught.value)
        assert f"worker {store.rank} on localhost (rank {store.rank} of" in text
        assert f"in {call}" in text
        assert "Not arrived: worker 1 on localhost" in text
        if call == "init":
            assert "'w'" in text
        raise ZeroDivisionError  # leave without close, which would wait for worker 1's answer in vain

    errors = failing(mode, body, timeout_s=LIMIT_S)
    workers = [rank for rank, error in errors.items() if isinstance(error, ZeroDivisionError)]
    assert len(workers) == mode.workers - 1, errors


@SYNC_KINDS
def test_a_worker_that_closes_early_is_told_at_once(mode):
    """Long before the time limit of 20 s: pulls, collective calls, requests."""

    def body(store):
        store.init(["v", "w"], [full(0), full(0)])
        store.push("v", full(1))
        if store.rank == 1:
            return None  # closes
        texts = []
        began_s = time.monotonic()
        store.push("w", full(1))
        request = store.pull_async("w")
        for wait in (lambda: store.pull("w"), request.wait, lambda: store.pushpull("w", full(1))):
            with pytest.raises(PeerError) as caught:
                wait()
            texts.append(str(caught.value))
        for call in (store.barrier, lambda: store.init("x", full(0)), lambda: store.set_optimizer("sgd")):
            with pytest.raises(PeerError, match="worker 1 on localhost closed"):
                call()
        assert time.monotonic() - began_s < 15
        assert store.pull("v").tolist() == [float(mode.workers)] * 4  # round 1 was complete
        return texts

    errors = failing(mode, body)
    expected = {0, 2}
    found = {rank for rank, error in errors.items() if isinstance(error, PeerError)}
    assert found == expected, errors
    for rank in expected:  # what their close says
        assert "'w'" in str(errors[rank])
        assert "worker 1 on localhost" in str(errors[rank])


@SYNC_KINDS
def test_early_close_names_key_round_and_worker(mode):
    def body(store):
        store.init("w", full(0))
        for _ in range(2):
            store.push("w", full(1))
        if store.rank == 1:
            return
        assert store.pull("w").tolist() == [float(mode.workers)] * 4
        store.push("w", full(1))
        with pytest.raises(PeerError) as caught:
            store.pull("w")
        text = str(caught.value)
        for part in (f"worker {store.rank} on localhost", "'w'", "round 3", "worker 1 on localhost", "after 2 pushes"):
            assert part in text
        raise ZeroDivisionError

    errors = failing(mode, body, timeout_s=5)
    assert [type(errors[rank]) for rank in (0, 2)] == [ZeroDivisionError] * 2


@pytest.mark.parametrize("mode", FEW_ASYNC, ids=mode_id)
def test_asynchronous_workers_may_end_at_different_times(mode):
    """A worker that has closed goes on serving its shards until all have closed."""

    def body(store):
        store.set_optimizer(optimizers.create("test"))
        store.init(["v", "w", "x"], [full(0, 30)] * 3)
        store.barrier()
        if store.rank == 1:
            store.push("w", full(100, 30))
            return None
        for _ in range(50):
            store.push(["v", "w", "x"], [full(1, 30)] * 3)
            value = store.pull("w")
        return value.tolist()

    assert mode.run(body)[1] is None


@SYNC_KINDS
@pytest.mark.parametrize("n", [4, 5000])
def test_close_with_unequal_pushes(mode, n):
    def body(store):
        store.init(["v", "w"], [full(0, n), full(0, n)])
        for _ in range(3 if store.rank == 1 else 2):
            store.push("w", full(1, n))
        store.push("v", full(1, n))

    errors = failing(mode, body, timeout_s=5)
    assert isinstance(errors[1], PeerError)
    text = str(errors[1])
    for part in ("worker 1 on localhost", "'w'", "3 times", "2 times by", "worker 0 on localhost", "round 3"):
        assert part in text
    assert "'v'" not in text
    assert not {rank for rank in (0, 2) if rank in errors}, errors


@SYNC_KINDS
def test_close_does_every_round_that_is_complete(mode):
    """Nobody pulls: what was pushed reaches the owners all the same."""
    seen = []

    def counting(weight, grad, state):
        seen.append(weight.size)
        weight += grad
        return state

    def body(store):
        store.init("w", full(0, 12))
        store.set_optimizer(counting)
        time.sleep(0.03 * store.rank)
        for _ in range(5):
            store.push("w", full(1, 12))

    class Cell:  # a list in a closure would be pickled by value
        pass

    found = Cell()

    def checked(store):
        body(store)
        store.barrier()
        return np.unique(store.pull("w")).tolist()

    assert mode.run(checked) == [[5.0 * mode.workers]] * mode.workers
    del found
    mode.run(body)


@DIST
def test_different_calls_at_one_time(mode):
    """Every worker in another collective call: an error that says where each is, not a stall."""

    def body(store):
        calls = [
            store.barrier,
            lambda: store.init("w", full(0)),
            lambda: store.set_optimizer(optimizers.create("test")),
        ]
        with pytest.raises(MpikvError) as caught:
            calls[store.rank]()
        store.barrier()
        return type(caught.value), str(caught.value)

    results = mode.run(body)
    texts = {text for _, text in results}
    assert len(texts) == 1
    text = texts.pop()
    assert "worker 0 on localhost: barrier" in text
    assert "worker 1 on localhost: init('w')" in text
    if mode.workers > 2:
        assert "worker 2 on localhost: set_optimizer" in text


@pytest.mark.parametrize("mode", FEW, ids=mode_id)
def test_close_without_anything(mode):
    assert mode.run(lambda store: store.rank) == list(range(mode.workers))


def test_threads_end_with_their_store():
    before = set(threading.enumerate())
    for mode in (Mode("dist_sync", 2), Mode("dist_sync", 1, 1), Mode("dist_async", 2)):
        mode.run(lambda store: store.init("w", full(0)))
    left = [thread for thread in threading.enumerate() if thread not in before and thread.name == "mpikv-progress"]
    assert left == []
