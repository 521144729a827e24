"""Waits that cannot end well: workers that do not come, close early, or push a key unequally often."""

from __future__ import annotations

import contextlib
import re
import threading
from functools import partial

import pytest
from on_workers import full, limit, on, uniform
from store_modes import ADDING, FEW_ASYNC, FEW_ON_DEVICE, HYBRID, TWO_HOSTS, Mode

from mpikv import ConfigError, MpikvError, PeerError, StallError, optimizers
from mpikv.arrays.as_numpy import host_view
from mpikv.strategies.base import Sink
from mpikv.strategies.client_key import ClientKey

# On one host, by messages, through servers, divided, and on devices.
SYNC = (
    *(
        Mode("dist_sync", 3),
        Mode("dist_sync", 3, 0, "ring"),
        Mode("dist_sync", 3, 2),
        Mode("dist_sync", 3, 2, memory="off"),
    ),
    *(TWO_HOSTS, HYBRID[0], ADDING[0], FEW_ON_DEVICE[0]),
)
LIMIT_S = 0.2  # of what waits in vain


@pytest.fixture
def pushed():
    return threading.Event()


@on(*SYNC)
@pytest.mark.parametrize("call", ["pull", "pushpull", "list", "request"])
@pytest.mark.usefixtures("answers")
def test_stall_says_who_waits_for_what_and_who_is_missing(store, mode, call, pushed, told):
    keys = ["other", "w"] if call in ("list", "request") else ["w"]
    store.init(keys, [full(0) for _ in keys])
    if store.rank:
        if store.rank == 1:
            store.push(keys[:-1], [full(1)] * len(keys[:-1]))
        else:
            store.push(keys, [full(1)] * len(keys))
            pushed.set()
        assert told.wait(60)  # worker 1 computes for long
        if store.rank == 1:
            store.push("w", full(1))
        assert uniform(store.pull("w")) == 3  # the stall of one worker did no harm to the round
        return
    assert pushed.wait(60)
    values = [full(1) for _ in keys]
    if call == "pull":
        store.push("w", *values)
        waits = partial(store.pull, "w")
    elif call == "request":
        request = store.pushpull_async(keys, values)
        waits = partial(request.wait, timeout_s=LIMIT_S)
    else:
        waits = partial(store.pushpull, keys, values)
    with limit(store, 60 if call == "request" else LIMIT_S), pytest.raises(StallError) as caught:
        waits()
    assert call != "request" or not request.test()
    told.set()
    for part in (
        f"worker 0 on localhost (rank 0 of {mode.workers + mode.servers})",
        f"waited {LIMIT_S:g} s in {'pull' if call == 'pull' else 'pushpull'} of key 'w', round 1",
        "Not arrived: worker 1 on localhost (pushed it 0 times; outside the store",
        "Arrived: worker 2",
    ):
        assert part in str(caught.value)
    assert uniform(store.pull("w")) == 3
    store.close()
    if call != "pull" and not mode.device:  # the call that its caller has given up went on
        assert uniform(values) == 3


COLLECTIVE = {
    "barrier": lambda store: store.barrier(),
    "init('w')": lambda store: store.init("w", full(0)),
    "set_optimizer": lambda store: store.set_optimizer(optimizers.create("test")),
}


@on(*SYNC[1:3], FEW_ASYNC[1])
@pytest.mark.parametrize("call", COLLECTIVE)
@pytest.mark.usefixtures("answers")
def test_stall_of_collective_calls(store, mode, call, told):
    if store.rank == 0:
        with limit(store, LIMIT_S), pytest.raises(StallError) as caught:
            COLLECTIVE[call](store)
        told.set()
        assert f"worker 0 on localhost (rank 0 of {mode.workers + mode.servers})" in str(caught.value)
        assert f"in {call}. Not arrived: worker 1 on localhost (outside the store" in str(caught.value)
    elif store.rank == 1:
        assert told.wait(60)
    else:
        with contextlib.suppress(PeerError):
            COLLECTIVE[call](store)
        assert told.wait(60)  # else worker 0 would hear of who has left, maybe


@on(*SYNC, *FEW_ASYNC[:2])
def test_different_calls_at_one_time(mode):
    """Every worker in another collective call: an error that says where each is, not a stall."""

    def body(store):
        with pytest.raises(MpikvError) as caught:
            list(COLLECTIVE.values())[store.rank](store)
        return str(caught.value)

    (text,) = set(mode.run(body))
    for worker, call in zip(range(mode.workers), COLLECTIVE, strict=False):
        assert re.search(rf"worker {worker} on \w+: {re.escape(call)}", text)


@on(*SYNC, timeout_s=3600)  # longer than pytest waits
def test_a_worker_that_closes_early_is_told_at_once(store, W):
    """Whatever the time limit: pulls, collective calls, requests. Key, round and worker are named."""
    store.init(["v", "w"], [full(0), full(0)])
    for _ in range(2):
        store.push("w", full(1))
    if store.rank == 1:
        return  # closes
    assert uniform(store.pull("w")) == W  # of rounds that are complete
    store.push("w", full(1))
    request = store.pull_async("w")
    for round_, wait in ((3, lambda: store.pull("w")), (3, request.wait), (4, lambda: store.pushpull("w", full(1)))):
        with pytest.raises(PeerError) as caught:
            wait()
        for part in (f"worker {store.rank} on", "'w'", f"round {round_}", "worker 1 on localhost", "after 2 pushes"):
            assert part in str(caught.value)
    for call in (store.barrier, lambda: store.init("x", full(0)), lambda: store.set_optimizer("sgd")):
        with pytest.raises(PeerError, match=r"worker 1 on localhost.* closed"):
            call()
    store.push("v", full(1))
    with pytest.raises(PeerError, match=r"'v'.*round 1 ") as caught:
        store.close()
    assert "'w'" not in str(caught.value)  # of which that was said


@pytest.mark.parametrize("call", ["save_optimizer_states", "load_optimizer_states"])
@on(SYNC[1], SYNC[2], FEW_ASYNC[1])
def test_saving_after_a_worker_has_closed(store, call, tmp_path):
    store.init("w", full(0))
    store.set_optimizer(optimizers.create("test"))
    store.push("w", full(1))
    store.barrier()
    store.save_optimizer_states(tmp_path / "states")
    if store.rank != 1:
        with pytest.raises(PeerError, match=rf"{call}.*worker 1 on localhost.* closed"):
            getattr(store, call)(tmp_path / "states")
    assert (tmp_path / "states").stat().st_size


@on(*FEW_ASYNC)
def test_asynchronous_workers_may_end_at_different_times(store):
    """A worker that has closed goes on serving its shards until all have closed."""
    store.set_optimizer(optimizers.create("test"))
    store.init(["v", "w", "x"], [full(0, 30)] * 3)
    store.barrier()
    if store.rank == 1:
        store.push("w", full(100, 30))
        return
    for _ in range(50):
        store.push(["v", "w", "x"], [full(1, 30)] * 3)
        store.pull("w")


@on(*SYNC)
def test_close_with_unequal_pushes(store, mode):
    """The worker that pushed more is told; the others close in peace, all rounds in common done."""
    n = 5000 if mode.memory == "off" else 4
    store.init(["v", "w"], [full(0, n), full(0, n)])
    for _ in range(3 if store.rank == 1 else 2):
        store.push("w", full(1, n))
    store.push("v", full(1, n))
    if store.rank != 1:
        store.close()
        return
    with pytest.raises(PeerError) as caught:
        store.close()
    for part in ("worker 1 on localhost", "'w'", "3 times", "2 times by", "worker 0 on localhost", "round 3"):
        assert part in str(caught.value)
    assert "'v'" not in str(caught.value)


# --- an error that a caller has been given, and one that nobody has been given


def close(store):
    """What `close` raises, by name."""
    try:
        store.close()
    except Exception as error:
        return type(error).__name__
    return "closed"


GIVEN = pytest.mark.parametrize("given", [True, False], ids=["given", "given to nobody"])


@on(*SYNC)
@GIVEN
def test_a_refused_round(store, mode, given):
    store.init(["v", "w"], [full(0), full(0)])
    optimizer = optimizers.create("sgd")
    store.set_optimizer(optimizer)
    optimizer.learning_rate = 1.0 + store.rank
    request = store.pushpull_async(["v", "w"], [full(1), full(1)])
    if given:
        with pytest.raises(ConfigError, match="learning_rate"):  # of one key or the other
            request.wait() if mode.servers else store.pull(["v", "w"])
    assert close(store) == ("closed" if given else "ConfigError")


@on(*SYNC)
@GIVEN
def test_a_result_that_cannot_be_written(store, given, monkeypatch):
    """What goes wrong between the store and the caller's arrays: the others know nothing of it."""

    def fails(sink, *arguments):
        raise OSError("no room")

    store.init("w", full(0, 5000))
    store.barrier()
    monkeypatch.setattr(Sink, "deliver", fails)
    request = store.pushpull_async("w", full(1, 5000), out=full(0, 5000))
    if given:
        with pytest.raises(OSError, match="no room"):
            request.wait()
    assert close(store) == ("closed" if given else "OSError")


@on(Mode("dist_sync", 2, 1), Mode("dist_async", 2, 1))
@GIVEN
@pytest.mark.usefixtures("silent")
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
        with limit(store, LIMIT_S):  # the round is never complete
            return close(store)

    results = mode.run(body)
    assert results[1] == ("closed" if given else "OverflowError") or (given and results[1] == "PeerError")


@on(*SYNC)
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
    rounds = [round_ for path in tmp_path.iterdir() for round_ in path.read_text().split()]
    assert set(rounds) == {str(mode.workers * round_) for round_ in range(5)}
    assert len({rounds.count(round_) for round_ in rounds}) == 1  # each in as many parts as the first
