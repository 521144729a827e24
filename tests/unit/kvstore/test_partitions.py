"""Large values travel to servers and back in partitions: the same results, messages and memory counted."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
from on_workers import full, limit, on, uniform
from store_modes import Mode

from mpikv import StallError, optimizers
from mpikv.create import assembly
from mpikv.strategies import exchange
from mpikv.transports import wire
from mpikv.transports.threads import Fabric

PART_ELEMS = 8
PART_BYTES = 4 * PART_ELEMS
SIZES = (0, 1, PART_ELEMS - 1, PART_ELEMS, PART_ELEMS + 1, 2 * PART_ELEMS, 3 * PART_ELEMS + 5, 9 * PART_ELEMS - 1)
NEVER = 10**9  # elements: keys stay whole


OPTIMIZERS = {
    "none": None,
    "momentum": lambda: optimizers.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01),
    "lamb": lambda: optimizers.create("lamb", learning_rate=0.01),
}


def body_of(name):
    def body(store):
        numbers = np.random.default_rng(store.rank)
        store.init([str(n) for n in SIZES], [np.linspace(-1, 1, n).astype(np.float32) for n in SIZES])
        if OPTIMIZERS[name]:
            store.set_optimizer(OPTIMIZERS[name]())
        found = []
        for _ in range(4):
            for n in SIZES:
                value = (numbers.standard_normal(n) * 10.0 ** numbers.integers(-3, 4, n)).astype(np.float32)
                store.pushpull(str(n), value)
                found.append(value.tobytes())
        return found

    return body


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("workers", [2, 3])
def test_same_bits_as_without_partitions(name, workers, unruly):
    """And as without servers, also for an optimizer that needs whole values; whatever comes first."""
    expected = Mode("dist_sync", workers, 0, "owners").run(body_of(name))
    for servers, bound, memory in ((1, NEVER, "auto"), (2, NEVER, "off"), (2, 20, "long"), (2, 20, "off")):
        mode = Mode("dist_sync", workers, servers, memory=memory, part_bytes=PART_BYTES)
        assert mode.run(body_of(name), bigarray_bound_elems=bound) == expected


# --- optimizers that come and go


@pytest.mark.parametrize("memory", ["auto", "off", "long"])
def test_units_follow_the_optimizer(memory):
    """Elementwise, whole, elementwise again, between rounds and with a round that only one worker has pushed."""
    n = 5 * PART_ELEMS + 3

    def body(store):
        numbers = np.random.default_rng(store.rank)
        store.init("w", np.linspace(-1, 1, n).astype(np.float32))
        found = []
        for round_, name in enumerate(("sgd", "lamb", "adam", "lamb", "adam")):
            values = [numbers.standard_normal(n).astype(np.float32) for _ in range(3)]
            early = [values.pop()] if store.rank == round_ % 2 else []
            for value in early:
                store.push("w", value)
            store.set_optimizer(optimizers.create(name, learning_rate=0.05))
            for value in values:
                store.push("w", value)
            found.append(store.pull("w").tobytes())
        return found

    whole, cut = (
        Mode("dist_sync", 2, 1, memory=memory, part_bytes=part).run(body, bigarray_bound_elems=NEVER)
        for part in (1 << 20, PART_BYTES)
    )
    assert whole[0] == whole[1]
    assert cut == whole


# --- counts


def messages(mode, sizes, call, **changes):
    """Messages and bytes of one `call(store, keys, arrays)` by every worker: those of three minus those of two."""
    counts = []
    for calls in (2, 3):

        def body(store, calls=calls):
            keys = [str(i) for i in range(len(sizes))]
            store.init(keys, [np.zeros(n, np.float32) for n in sizes])
            arrays = [np.ones(n, np.float32) for n in sizes]
            for _ in range(calls):
                call(store, keys, arrays)
            store.barrier()  # a worker that leaves long before the others is told of

        mode.run(body, fabric=(fabric := Fabric(mode.workers + mode.servers)), bigarray_bound_elems=NEVER, **changes)
        counts.append(np.array([fabric.sent_messages, fabric.sent_bytes]))
    return (counts[1] - counts[0]).tolist()


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


@pytest.mark.parametrize(
    ("mode", "sizes", "call", "n_messages", "n_bytes"),
    [
        *(("1", SMALL, together, 2, BYTES), ("3", SMALL, together, 2, BYTES)),  # one message each way
        *(("1", SMALL, one_by_one, 2 * 40, None), ("2/2", SMALL, together, 4, None)),  # one for each server
        ("2", SMALL, pushes, 1 + 2, None),  # a push is not answered; the pull of one key is a question and an answer
        # A header and its partitions each way, which the server asks for, but where MPI itself agrees on them.
        *(("2", [100], call, 2 + 2 * 4, LARGE_BYTES + ASKED) for call in (together, one_by_one)),
        ("2 mpi", [1 << 15], together, 1 + 2 * 2, wire.HEADER_BYTES + 2 * (1 << 17)),
        *(("2/2 memory", [5, 100, 1000, 100_000], call, 0, 0) for call in (together, one_by_one, pushes)),
    ],
)
def test_messages(mode, sizes, call, n_messages, n_bytes):
    """Of each worker, there and back."""
    workers, servers = int(mode[0]), 2 if "/" in mode else 1
    part_bytes = 1 << 16 if "mpi" in mode else 4 * 32
    memory = "auto" if "memory" in mode else "off"
    found = messages(Mode("dist_sync", workers, servers, memory=memory, part_bytes=part_bytes), sizes, call)
    assert found == [workers * n_messages, found[1] if n_bytes is None else workers * n_bytes]


def test_messages_of_many_small_keys_are_cut(monkeypatch):
    monkeypatch.setattr(exchange, "LINK_SEGMENT_BYTES", 1000)
    per_message = 1000 // (wire.HEADER_BYTES + 20)
    assert messages(Mode("dist_sync", 1, 1, memory="off"), SMALL, together)[0] == 2 * -(-40 // per_message)


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
    n = 50 * PART_ELEMS + 3

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

    Mode("dist_sync", workers, 1, memory=memory, part_bytes=PART_BYTES).run(body, bigarray_bound_elems=NEVER)
    (core,) = cores
    assert core.pool.held_bytes <= 4 * n * (1 + workers)


# --- waits for several keys at once

WAITS = pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])


@WAITS
@on(Mode("dist_sync", 2, 1))
@pytest.mark.usefixtures("answers")
def test_a_stall_names_the_key_that_is_missing(store, asynchronous, told):
    """And the call, which its caller has given up, goes on all the same."""
    arrays = [full(1, 2), full(1, 3)]
    store.init(["a", "b"], arrays)
    if store.rank == 1:
        store.push("a", arrays[0])
        assert told.wait(60)
        store.pushpull("b", arrays[1])
    else:
        request = store.pushpull_async(["a", "b"], arrays) if asynchronous else None
        wait = partial(request.wait, 0.3) if request else partial(store.pushpull, ["a", "b"], arrays)
        with (
            limit(store),
            pytest.raises(StallError, match=r"key 'b', round 1\. Not arrived: worker 1.*pushed it 0 times"),
        ):
            wait()
        told.set()
        request.wait() if request else store.pull("b")
        deadline = time.monotonic() + 60
        while arrays[1][0] == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert uniform(arrays[1]) == 2
