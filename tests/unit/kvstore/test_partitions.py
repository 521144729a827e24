"""What travels to owners and back, small keys together and large values in partitions: messages, bytes, memory."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
from on_workers import full
from store_modes import Mode

from mpikv import optimizers
from mpikv.create import assembly
from mpikv.strategies import exchange
from mpikv.transports import wire
from mpikv.transports.threads import Fabric

NEVER = 10**9  # elements: keys stay whole


def messages(mode, sizes, call):
    """Messages and bytes of one `call(store, keys, arrays)` by every worker, the third one."""
    fabric = Fabric(mode.workers + mode.servers, tuple(mode.hosts) or None)
    counts, all_are_here = [], threading.Barrier(mode.workers)

    def count(store):
        """While nobody is in a call."""
        all_are_here.wait(60)
        if store.rank == 0:
            counts.append(np.array([fabric.sent_messages, fabric.sent_bytes]))
        all_are_here.wait(60)

    def body(store):
        keys, arrays = [str(i) for i in range(len(sizes))], [np.ones(n, np.float32) for n in sizes]
        store.init(keys, [np.zeros(n, np.float32) for n in sizes])
        for _ in range(2):
            call(store, keys, arrays)
        count(store)
        call(store, keys, arrays)
        count(store)

    mode.run(body, fabric=fabric, bigarray_bound_elems=NEVER)
    before, after = counts
    return (after - before).tolist()


def pushes(store, keys, arrays):
    store.push(keys, arrays)
    store.pull(keys[0])


def together(store, keys, arrays):
    store.pushpull(keys, arrays)


def one_by_one(store, keys, arrays):
    for key, array in zip(keys, arrays, strict=True):
        store.pushpull(key, array)


SMALL = [5] * 40
# In one message each is padded, all but the last, and the answer has as many bytes as the values.
BYTES = 40 * (wire.HEADER_BYTES + 32) - (32 - 20) + 40 * 20
ASKED = wire.control({"kind": "fetch", "tag": wire.TAG_PAYLOAD + 1, "count": 4}).nbytes  # for all pieces at once
LARGE_BYTES = wire.HEADER_BYTES + 2 * 4 * 100
By = partial(Mode, "dist_sync", memory="off", part_bytes=4 * 32)


@pytest.mark.parametrize(
    ("mode", "sizes", "call", "n_messages", "n_bytes"),
    [
        *((By(1, 1), SMALL, together, 2, BYTES), (By(3, 1), SMALL, together, 2, BYTES)),  # one message each way
        *((By(1, 1), SMALL, one_by_one, 2 * 40, None), (By(2, 2), SMALL, together, 4, None)),  # one for each server
        (By(2, algorithm="owners", hosts="ab"), SMALL, together, 2, None),  # a request to the other worker, an answer
        (By(2, 1), SMALL, pushes, 1 + 2, None),  # a push is not answered; the pull of one key is a question, an answer
        # A header and its partitions each way, which the server asks for, but where MPI itself agrees on them.
        *((By(2, 1), [100], call, 2 + 2 * 4, LARGE_BYTES + ASKED) for call in (together, one_by_one)),
        (By(2, 1, part_bytes=1 << 16), [1 << 15], together, 1 + 2 * 2, wire.HEADER_BYTES + 2 * (1 << 17)),
        *((By(2, 2, memory="auto"), [5, 100, 1000, 100_000], call, 0, 0) for call in (together, one_by_one, pushes)),
    ],
)
def test_messages(mode, sizes, call, n_messages, n_bytes):
    """Of each worker, there and back."""
    found = messages(mode, sizes, call)
    assert found == [mode.workers * n_messages, found[1] if n_bytes is None else mode.workers * n_bytes]


def test_messages_of_many_small_keys_are_cut(monkeypatch):
    monkeypatch.setattr(exchange, "LINK_SEGMENT_BYTES", 1000)
    per_message = 1000 // (wire.HEADER_BYTES + 20)
    assert messages(By(1, 1), SMALL, together)[0] == 2 * -(-40 // per_message)


@pytest.mark.parametrize(
    ("workers", "name", "memory"), [(1, "none", "auto"), (2, "test", "off"), (3, "lamb", "long"), (3, "none", "off")]
)
def test_memory_of_a_server(monkeypatch, workers, name, memory):
    """Values, and one gradient per worker at most, though one worker is many rounds ahead of the others."""
    cores, made = [], assembly.ServerCore

    def noted(*arguments, **options):
        cores.append(made(*arguments, **options))
        return cores[-1]

    monkeypatch.setattr(assembly, "ServerCore", noted)
    n = 403

    def body(store):
        store.init("w", full(0, n))
        if name != "none":
            store.set_optimizer(optimizers.create(name))
        for ahead in (True, False):
            for _ in range(6 if (store.rank == workers - 1) == ahead else 0):
                store.push("w", full(1, n))
            store.barrier()
        for _ in range(3):
            store.pushpull("w", full(1, n))

    Mode("dist_sync", workers, 1, memory=memory, part_bytes=32).run(body, bigarray_bound_elems=NEVER)
    (core,) = cores
    assert core.pool.held_bytes <= 4 * n * (1 + workers)
