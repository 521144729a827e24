"""Stopping together: what `stop_requested` says on thread ranks, in every mode, whoever asks and when."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mpikv import StallError
from mpikv.config import Config
from mpikv.create import spec
from mpikv.create.assembly import local_store
from mpikv.errors import MpikvError
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import spawn_stores

ONES = np.ones(5, np.float32)
MODES = [
    ("dist_sync", 1, 0),
    ("dist_sync", 2, 0),
    ("dist_sync", 3, 0),
    ("dist_sync", 2, 1),
    ("dist_sync", 3, 2),
    ("dist_async", 1, 0),
    ("dist_async", 3, 0),
    ("dist_async", 3, 2),
]


def config(progress: str, **more) -> Config:
    return Config(timeout_s=20, progress=progress, **more)


def prepared(store) -> None:
    store.init("w", np.zeros(5, np.float32))
    if "async" in store.type:
        store.set_optimizer("test")
    store.barrier()


def steps(store, asking: dict[int, int], limit: int = 20000) -> int:
    """Train until told to stop; the number of the read that said so. asking: worker -> the step in which it asks."""
    prepared(store)
    for step in range(1, limit + 1):
        if asking.get(store.rank) == step:
            store.request_stop()
        store.pushpull("w", ONES.copy())
        if store.stop_requested:
            assert store.stop_requested  # it stays so
            return step
        time.sleep(0.0002)  # asynchronous workers do not wait for each other: let all have their turn
    return -1


@pytest.mark.grid
@pytest.mark.parametrize("progress", ["thread", "calls"])
@pytest.mark.parametrize(("kind", "workers", "servers"), MODES)
@pytest.mark.parametrize("who", ["first", "last", "all"])
def test_all_stop(kind, workers, servers, progress, who):
    """Synchronous workers then all hold the sum of the agreed round: none has pushed another one."""
    asking = {"first": {0: 3}, "last": {workers - 1: 3}, "all": dict.fromkeys(range(workers), 3)}[who]
    # Three workers without servers: by messages. Fewer: through shared memory.
    settings = config(progress, shared_memory="off" if (workers, servers) == (3, 0) else "auto")

    def body(store):
        return steps(store, asking), store.pull("w").tolist()

    ended = spawn_stores(kind, workers, body, num_servers=servers, config=settings)
    found = [step for step, _ in ended]
    assert max(found[worker] for worker in asking) >= 3
    assert min(found) > 0
    if kind == "dist_sync":
        assert ended == [(found[0], [float(workers)] * 5)] * workers


@pytest.mark.parametrize(("kind", "workers", "servers"), MODES)
def test_no_messages_until_somebody_asks(kind, workers, servers):
    def body(store):
        prepared(store)
        before = store.stats()
        said = [store.stop_requested for _ in range(1000)]
        after = store.stats()
        store.barrier()
        return any(said), {name: after[name] - before[name] for name in before if name.endswith("_sent")}

    # A service inside a worker may answer another worker meanwhile; with "calls" nothing moves but in calls.
    for said, sent in spawn_stores(kind, workers, body, num_servers=servers, config=config("calls")):
        assert not said
        assert sent["control_messages_sent"] == 0
        if not (kind == "dist_async" and not servers):
            assert sent["messages_sent"] == 0


def test_messages_of_a_stop():
    """A wish, and for each worker but worker 0 a question, an answer and the decision."""

    def body(store):
        prepared(store)
        before = store.stats()["control_messages_sent"]
        if store.rank == 2:
            store.request_stop()
        while not store.stop_requested:
            store.pushpull("w", ONES.copy())
        return store.stats()["control_messages_sent"] - before

    assert spawn_stores("dist_sync", 4, body, config=config("thread")) == [6, 1, 2, 1]


@pytest.mark.parametrize("progress", ["thread", "calls"])
def test_workers_far_ahead(progress):
    """Pushes do not wait, so that a worker may be many steps ahead: the others go on to where it is."""

    def body(store):
        prepared(store)
        step = 0
        while True:
            step += 1
            store.push("w", ONES)
            if store.rank == 1 and step == 50:
                store.request_stop()
            if store.rank == 0:
                time.sleep(0.002)
            if store.stop_requested:
                return step

    found = spawn_stores("dist_sync", 2, body, config=config(progress), num_servers=1)
    assert len(set(found)) == 1
    assert found[0] >= 50


def test_a_worker_that_never_reads_is_named():
    asleep, told = threading.Event(), threading.Event()

    def body(store):
        prepared(store)
        if store.rank == 0:
            asleep.wait(10)
            store.request_stop()
            try:
                assert store.stop_requested
            finally:
                told.set()
        else:
            asleep.set()
            assert told.wait(30)  # moves no message on meanwhile, and no thread does it either

    with pytest.raises(RankError) as caught:
        spawn_stores("dist_sync", 2, body, config=Config(timeout_s=0.3, progress="calls"))
    error = caught.value.errors[0]
    assert isinstance(error, StallError)
    assert "in stop_requested" in str(error)
    assert "worker 1 on localhost" in str(error)


@pytest.mark.parametrize(("kind", "workers", "servers"), [mode for mode in MODES if mode[1] > 1])
def test_after_the_last_step_nobody_stops(kind, workers, servers):
    """Asked for when all have made their last read: the program ends as it would have."""

    def body(store):
        prepared(store)
        said = []
        for _ in range(5):
            store.pushpull("w", ONES.copy())
            said.append(store.stop_requested)
        store.barrier()
        store.request_stop()
        store.barrier()
        return any(said)

    assert not any(spawn_stores(kind, workers, body, num_servers=servers, config=config("thread")))


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("progress", ["thread", "calls"])
def test_asynchronous_worker_that_has_finished(progress, servers):
    """It waits in `close`, where it cannot stop: the others, held at first, go on to their end."""

    def body(store):
        prepared(store)
        said = []
        for step in range(3 if store.rank == 0 else 40):
            store.pushpull("w", ONES.copy())
            if store.rank == 1 and step == 10:
                store.request_stop()
            said.append(store.stop_requested)
            if step == 2:
                store.barrier()  # worker 0 has made its last read before anybody asks
            time.sleep(0.002)
        return said

    first, second, third = spawn_stores("dist_async", 3, body, num_servers=servers, config=config(progress))
    assert (len(first), len(second), len(third)) == (3, 40, 40)
    assert not any(first + second + third)


def test_a_store_of_one_process():
    store = local_store("local", spec.parse("local"))
    assert not store.stop_requested
    store.request_stop()
    assert store.stop_requested
    assert store.stop_requested
    store.close()
    for call in (lambda: store.stop_requested, store.request_stop):
        with pytest.raises(MpikvError, match="closed store"):
            call()
