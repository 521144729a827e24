"""Waits that cannot end well: workers that do not come, close early, or push a key unequally often."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from store_modes import FEW, FEW_ASYNC, FEW_DIST_SYNC, Mode, mode_id

from mpikv import ConfigError, MpikvError, PeerError, ShapeMismatch, StallError, optimizers
from mpikv.arrays.as_numpy import host_view
from mpikv.strategies.base import Sink
from mpikv.strategies.client_key import ClientKey

SYNC_KINDS = pytest.mark.parametrize("mode", [Mode("dist_sync", 3), *FEW_DIST_SYNC], ids=mode_id)
DIST = pytest.mark.parametrize("mode", [*FEW_DIST_SYNC, *FEW_ASYNC], ids=mode_id)
LIMIT_S = 0.5


def full(value, n=4):
    return np.full(n, value, np.float32)


@pytest.mark.parametrize(
    ("mode", "call"),
    [
        (FEW_DIST_SYNC[0], "pull"),
        (FEW_DIST_SYNC[2], "pull"),
        (FEW_DIST_SYNC[0], "pushpull"),
        (FEW_DIST_SYNC[2], "pushpull"),
    ],
)
def test_stall_says_who_waits_for_what_and_who_is_missing(mode, call):
    pushed, told = threading.Event(), threading.Event()

    def body(store):
        store.init(["w", "other"], [full(0), full(0)])
        if store.rank == 0:
            assert pushed.wait(20)
            if call == "pull":
                store.push("w", full(1))
            with pytest.raises(StallError) as caught:
                store.pull("w") if call == "pull" else store.pushpull("w", full(1))
            told.set()
            return str(caught.value)
        if store.rank == 2:
            store.push("w", full(1))
            pushed.set()
        assert told.wait(20)  # worker 1 computes for long
        if store.rank == 1:
            store.push("w", full(1))
        return store.pull("w").tolist()

    text, *values = mode.run(body, timeout_s=LIMIT_S)
    assert values == [[3.0] * 4] * 2  # the stall of one worker did no harm to the round
    ranks = mode.workers + mode.servers
    parts = [f"worker 0 on localhost (rank 0 of {ranks}) waited {LIMIT_S:g} s in {call} of key 'w', round 1"]
    parts += ["Not arrived: worker 1 on localhost (pushed it 0 times; outside the store", "Arrived: worker 2"]
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("mode", "call"),
    [
        (FEW_DIST_SYNC[0], "barrier"),
        (FEW_DIST_SYNC[2], "barrier"),
        (FEW_ASYNC[0], "barrier"),
        (FEW_DIST_SYNC[1], "init('w')"),
        (FEW_DIST_SYNC[2], "init('w')"),
        (FEW_DIST_SYNC[0], "set_optimizer"),
        (FEW_ASYNC[1], "set_optimizer"),
    ],
)
def test_stall_of_collective_calls(mode, call):
    told = threading.Event()

    def body(store):
        if store.rank == 1:
            assert told.wait(20)
            return None
        if store.rank == 2:
            with contextlib.suppress(StallError, PeerError):
                _call(store, call)
            return None
        with pytest.raises(StallError) as caught:
            _call(store, call)
        told.set()
        return str(caught.value)

    text = mode.run(body, timeout_s=LIMIT_S)[0]
    assert f"worker 0 on localhost (rank 0 of {mode.workers + mode.servers})" in text
    assert f"in {call}. Not arrived: worker 1 on localhost (outside the store" in text


def _call(store, call):
    if call == "barrier":
        store.barrier()
    elif call == "set_optimizer":
        store.set_optimizer(optimizers.create("test"))
    else:
        store.init("w", full(0))


@SYNC_KINDS
def test_a_worker_that_closes_early_is_told_at_once(mode):
    """Whatever the time limit: pulls, collective calls, requests."""

    def body(store):
        store.init(["v", "w"], [full(0), full(0)])
        store.push("v", full(1))
        if store.rank == 1:
            return None  # closes
        texts = []
        store.push("w", full(1))
        request = store.pull_async("w")
        for wait in (lambda: store.pull("w"), request.wait, lambda: store.pushpull("w", full(1))):
            with pytest.raises(PeerError) as caught:
                wait()
            texts.append(str(caught.value))
        for call in (store.barrier, lambda: store.init("x", full(0)), lambda: store.set_optimizer("sgd")):
            with pytest.raises(PeerError, match=r"worker 1 on localhost.* closed"):
                call()
        assert store.pull("v").tolist() == [float(mode.workers)] * 4  # round 1 was complete
        store.close()  # which says nothing that was said
        return texts

    results = mode.run(body, timeout_s=3600)  # longer than pytest waits
    for rank in (0, 2):
        for text in results[rank]:
            assert "'w'" in text
            assert "worker 1 on localhost" in text


@pytest.mark.grid
@DIST
@pytest.mark.parametrize("call", ["save_optimizer_states", "load_optimizer_states"])
def test_saving_after_a_worker_has_closed(mode, call, tmp_path):
    def body(store):
        store.init("w", full(0))
        store.set_optimizer(optimizers.create("test"))
        store.push("w", full(1))
        store.barrier()
        store.save_optimizer_states(tmp_path / "states")
        if store.rank != 1:
            with pytest.raises(PeerError, match=rf"{call}.*worker 1 on localhost.* closed"):
                getattr(store, call)(tmp_path / "states")

    mode.run(body, timeout_s=3)
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


@SYNC_KINDS
def test_early_close_names_key_round_and_worker(mode):
    def body(store):
        store.init(["w", "v"], [full(0)] * 2)
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
        store.push("v", full(1))
        with pytest.raises(PeerError, match=r"'v'.*round 1 "):  # of 'w' that was said
            store.close()

    mode.run(body, timeout_s=5)


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
    """The worker that pushed more is told; the others close in peace, all rounds in common done."""

    def body(store):
        store.init(["v", "w"], [full(0, n), full(0, n)])
        for _ in range(3 if store.rank == 1 else 2):
            store.push("w", full(1, n))
        store.push("v", full(1, n))
        try:
            store.close()
        except PeerError as error:
            return str(error)
        return "closed"

    results = mode.run(body, timeout_s=2)
    assert [results[0], results[2]] == ["closed"] * 2
    for part in ("worker 1 on localhost", "'w'", "3 times", "2 times by", "worker 0 on localhost", "round 3"):
        assert part in results[1]
    assert "'v'" not in results[1]


# --- an error that a caller has been given, and one that nobody has been given


def close(store):
    """What `close` raises, by name."""
    try:
        store.close()
    except Exception as error:
        return type(error).__name__
    return "closed"


GIVEN = pytest.mark.parametrize("given", [True, False], ids=["given", "given to nobody"])


@SYNC_KINDS
@GIVEN
@pytest.mark.parametrize("waits", [True, False], ids=["request", "pull"])
def test_a_refused_round(mode, given, waits):
    def body(store):
        store.init(["v", "w"], [full(0), full(0)])
        optimizer = optimizers.create("sgd")
        store.set_optimizer(optimizer)
        optimizer.learning_rate = 1.0 + store.rank
        request = store.pushpull_async(["v", "w"], [full(1), full(1)])
        if given:
            with pytest.raises(ConfigError, match="learning_rate"):  # of one key or the other
                request.wait() if waits else store.pull(["v", "w"])
        return close(store)

    assert mode.run(body, timeout_s=5) == ["closed" if given else "ConfigError"] * mode.workers


@SYNC_KINDS
@GIVEN
def test_a_result_that_cannot_be_written(mode, given, monkeypatch):
    """What goes wrong between the store and the caller's arrays: the others know nothing of it."""
    written = Sink.deliver

    def fails(sink, *arguments):
        written(sink, *arguments)
        raise OSError("no room")

    monkeypatch.setattr(Sink, "deliver", fails)

    def body(store):
        store.init("w", full(0, 5000))
        request = store.pushpull_async("w", full(1, 5000), out=full(0, 5000))
        if given:
            with pytest.raises(OSError, match="no room"):
                request.wait()
        return close(store)

    assert mode.run(body, timeout_s=5) == ["closed" if given else "OSError"] * mode.workers


@pytest.mark.parametrize("mode", [Mode("dist_sync", 2, 1), Mode("dist_async", 2, 1)], ids=mode_id)
@GIVEN
def test_what_goes_wrong_in_a_push_that_nobody_waits_for(mode, given, monkeypatch):
    """In the codec, for instance, when the engine encodes."""
    encode = ClientKey.encode

    def fails(key, total, begin, end, *, uncompressed=False):
        if key.info.key == "w" and threading.current_thread() in odd:
            raise OverflowError("the codec is broken")
        return encode(key, total, begin, end, uncompressed=uncompressed)

    odd = []
    monkeypatch.setattr(ClientKey, "encode", fails)

    def body(store):
        store.init("w", full(0))
        store.set_optimizer(optimizers.create("test"))
        if store.rank == 1:
            odd.append(threading.current_thread())
            if given:
                with pytest.raises(OverflowError, match="the codec is broken"):
                    store.pushpull_async("w", full(1)).wait()
            else:
                store.push("w", full(1))
            odd.clear()
        elif not given or not store.session.synchronous:
            store.push("w", full(1))
        return close(store)

    results = mode.run(body, timeout_s=LIMIT_S)
    assert results[1] == ("closed" if given else "OverflowError") or (given and results[1] == "PeerError")


@pytest.mark.parametrize("given", [True, False], ids=["given", "given to nobody"])
def test_a_key_that_workers_turn_out_not_to_agree_on(given):
    """`init` has returned on worker 0, since the others were in the `init` of another key."""

    def body(store):
        if store.rank == 0:
            store.init("a", full(0, 2))
            store.init("b", full(0))
            store.barrier()
            if given:
                with pytest.raises(ShapeMismatch, match="'a'"):
                    store.pull("a")
        else:
            store.init("b", full(0))
            with pytest.raises(ShapeMismatch, match="'a'"):
                store.init("a", full(0, 3))
            store.barrier()
        return close(store)

    assert Mode("dist_sync", 2).run(body, timeout_s=5) == ["closed" if given else "ShapeMismatch", "closed"]


@SYNC_KINDS
def test_close_does_every_round_that_is_complete(mode, tmp_path):
    """Nobody pulls: what was pushed reaches the owners all the same."""

    def noting(weight, grad, state):
        with open(tmp_path / f"{weight.size}-{threading.get_ident()}", "a") as file:
            file.write(f"{int(host_view(grad, 'grad')[0])} ")
        return state

    def body(store):
        store.init("w", full(0, 12))
        store.set_optimizer(noting)
        for round_ in range(5):
            store.push("w", full(round_, 12))

    mode.run(body, late=True)
    rounds = sorted(round_ for path in tmp_path.iterdir() for round_ in path.read_text().split())
    owners = len({path.name for path in tmp_path.iterdir()})
    assert owners >= 1
    assert set(rounds) == {str(mode.workers * round_) for round_ in range(5)}
    assert all(rounds.count(round_) == rounds.count("0") for round_ in rounds)


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
