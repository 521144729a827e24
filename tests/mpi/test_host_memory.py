"""The memory of a host between processes, on one host and on several pretended ones: the bits of messages."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from direct_stores import CALLS, exchange
from mpi_stores import full, numbers, on_workers

from mpikv import ConfigError, optimizers
from mpikv.hostmemory import segment
from mpikv.testing.paths import DTYPES, check_path


@pytest.mark.mpi
@pytest.mark.parametrize("naps", [False, True])
def test_workers_in_different_calls(comm, naps):
    """The same bits as with messages only, and no deadlock; also where ranks come later than the others' patience."""

    def body(store):
        keys, sizes = list("abc"), (3, 2000, 150_001)
        store.init(keys, [full(0.5, n) for n in sizes])
        shared, own, outs = store.zeros([(n,) for n in sizes]), *([full(0, n) for n in sizes] for _ in range(2))
        random, found = np.random.default_rng(store.rank), []
        for step in range(10):
            if step == 4:
                store.set_optimizer(optimizers.create("sgd", learning_rate=0.01, momentum=0.9))
            values = shared if step % 4 < 2 else own
            for i, value in enumerate(values):
                value[:] = numbers(store.rank, value.size, step * 3 + i)
            if naps:
                time.sleep(0.4 if (step, store.rank) == (6, store.num_workers - 1) else float(random.choice([0, 0.02])))
            call = CALLS[(step // 2 + store.rank) % len(CALLS)] if step % 2 else "list"
            exchange(store, "async" if call == "singles" else call, keys, values, outs)
            found += [value.tobytes() for value in (*values, *store.pull(keys))]
        store.set_optimizer(optimizers.create("test"))
        store.pushpull(keys, own)
        return [*found, *(value.tobytes() for value in own)]

    messages = on_workers(comm, "dist_sync", body, algorithm="owners")  # which add in the same order
    assert on_workers(comm, "dist_sync", body) == messages
    assert messages == [messages[0]] * comm.Get_size()


# --- several on each of several hosts


def check_hosts(comm, *, in_memory, **settings):
    """All kinds of calls, and whether workers of a host share memory."""

    def run(body):
        def checked(store):
            found = body(store)
            assert (store.stats().get("shared_bytes", 0) > 0) == in_memory
            return found

        return on_workers(comm, "dist_sync", checked, **settings)

    check_path(run, comm.Get_size(), dtypes=DTYPES[::4])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("n_hosts", "progress"), [(2, "thread"), (2, "calls"), (4, "thread")])
def test_pretended_hosts(comm, n_hosts, progress):
    """`auto` goes by the hosts; with fewer ranks than hosts every rank says so."""
    W = comm.Get_size()
    if n_hosts > W:
        with pytest.raises(ConfigError, match=f"MPIKV_TEST_HOSTS={n_hosts}, but there are only {W} ranks"):
            on_workers(comm, "dist_sync", lambda store: None, test_hosts=n_hosts)
        return
    check_hosts(comm, in_memory=n_hosts < W, test_hosts=n_hosts, progress=progress)


@pytest.mark.mpi(min_size=3)
def test_one_host_without_shared_memory(comm, monkeypatch):
    """Then no host uses it."""

    def refuse(*_):
        raise OSError("no such luck")

    if comm.Get_rank() == comm.Get_size() - 1:
        monkeypatch.setattr(os, "memfd_create", refuse)
        monkeypatch.setattr(segment, "_open", refuse)
    check_hosts(comm, in_memory=False, test_hosts=2)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("progress", ["thread", "calls"])
@pytest.mark.parametrize("take", [0.5, 1.0])
def test_one_worker_of_each_host_asks_the_servers(comm, take, progress):
    """The others send nothing to them, and all have the sums of all: whole numbers, which any order of adding gives."""
    n, size, n_rounds = 840 * 200, comm.Get_size() - 1, 3
    n_hosts = min(2, size - 1)  # of workers

    def body(store):
        numbers = np.arange(n, dtype=np.float32) % 100
        expected = size * numbers + sum(range(size))
        store.init("w", np.zeros(n, np.float32))
        store.pushpull("w", numbers + store.rank, out=(out := np.empty(n, np.float32)))
        assert out.tobytes() == expected.tobytes()
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0))
        store.barrier()
        before = store.stats()["bytes_sent"]
        for done in range(n_rounds):
            store.push("w", numbers + store.rank)
            assert store.pull("w").tobytes() == (-done * expected).tobytes()
        return store.stats()["bytes_sent"] - before

    sent = on_workers(
        *(comm, "dist_sync", body),
        **{"num_servers": 1, "server_placement": "last", "servers_take": take, "test_hosts": n_hosts + 1},
        progress=progress,
    )
    among_workers = 2 * (n_hosts - 1) * (1 - take)
    assert sum(sent) == pytest.approx(n_rounds * n * 4 * (n_hosts * take + among_workers), rel=0.02)
    if take == 1.0:
        assert sorted(sent)[: size - n_hosts] == [0] * (size - n_hosts)
