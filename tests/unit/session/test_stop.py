"""Stopping together: what `stop_requested` says on thread ranks, in every mode, whoever asks.

When they ask, and what the others do then, is in tests/property/test_stop_property.py.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from on_workers import limit

from mpikv import StallError
from mpikv.config import Config
from mpikv.create import spec
from mpikv.create.assembly import local_store
from mpikv.errors import MpikvError
from mpikv.session import waits
from mpikv.testing.stores import spawn_stores

ONES = np.ones(5, np.float32)
MODES = [*(("dist_sync", *n) for n in ((1, 0), (2, 0), (3, 0), (3, 2))), *(("dist_async", 3, n) for n in (0, 2))]


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


def test_a_worker_that_never_reads_is_named(monkeypatch):
    monkeypatch.setattr(waits, "ANSWER_S", 0.1)
    asleep, told = threading.Event(), threading.Event()

    def body(store):
        prepared(store)
        if store.rank == 0:
            assert asleep.wait(60)
            store.request_stop()
            with limit(store), pytest.raises(StallError, match=r"in stop_requested.*worker 1 on localhost"):
                assert store.stop_requested
            told.set()
        else:
            asleep.set()
            assert told.wait(60)  # moves no message on meanwhile, and no thread does it either
        assert store.stop_requested

    spawn_stores("dist_sync", 2, body, config=config("calls"))


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
