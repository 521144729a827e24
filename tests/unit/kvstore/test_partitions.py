"""Large values travel to servers and back in partitions: the same results, messages and memory counted."""

from __future__ import annotations

import functools
import threading
import time

import numpy as np
import pytest
from store_modes import Mode, every_way, mode_id
from test_store_network import unruly  # noqa: F401 - a fixture

from mpikv import PeerError, StallError, optimizers
from mpikv.config import Config
from mpikv.create import assembly
from mpikv.optimizers import states_file
from mpikv.placement import on_servers
from mpikv.session import cross_waits
from mpikv.strategies import exchange
from mpikv.testing import ranks, stores
from mpikv.transports import threads, wire
from mpikv.transports.threads import Fabric

PART_ELEMS = 8
SIZES = (0, 1, PART_ELEMS - 1, PART_ELEMS, PART_ELEMS + 1, 2 * PART_ELEMS, 3 * PART_ELEMS + 5, 9 * PART_ELEMS - 1)
NEVER = 10**9  # elements: keys stay whole
SERVED = every_way(Mode("dist_sync", 1, 1), Mode("dist_sync", 2, 1), Mode("dist_sync", 3, 2), Mode("dist_async", 2, 0))


def part_bytes(dtype):
    return PART_ELEMS * np.dtype(dtype).itemsize


def values_of(n, worker, round_, dtype):
    return ((np.arange(n) * 5 + worker + 3 * round_) % 7 - 3).astype(dtype)


OPTIMIZERS = {
    "none": None,
    "momentum": lambda: optimizers.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01),
    "lamb": lambda: optimizers.create("lamb", learning_rate=0.01),
}


def _bits(mode, optimizer, **changes):
    return mode.run(_body(optimizer), **changes)


@functools.cache
def _bits_without_servers(name, workers):
    return _bits(Mode("dist_sync", workers, 0, "naive"), OPTIMIZERS[name])


def _body(optimizer):
    def body(store):
        numbers = np.random.default_rng(store.rank)
        store.init([str(n) for n in SIZES], [np.linspace(-1, 1, n).astype(np.float32) for n in SIZES])
        if optimizer is not None:
            store.set_optimizer(optimizer())
        found = []
        for _ in range(4):
            for n in SIZES:
                value = (numbers.standard_normal(n) * 10.0 ** numbers.integers(-3, 4, n)).astype(np.float32)
                store.pushpull(str(n), value)
                found.append(value.tobytes())
        return found

    return body


@pytest.mark.grid
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("memory", ["auto", "off", "long"])
def test_same_bits_as_without_partitions(name, workers, memory, unruly):  # noqa: F811
    """And as without servers, also for an optimizer that needs whole values; whatever comes first."""
    expected = _bits_without_servers(name, workers)
    for servers, bound in ((1, NEVER), (2, NEVER), (2, 20)):
        found = _bits(
            Mode("dist_sync", workers, servers, memory=memory),
            OPTIMIZERS[name],
            partition_bytes=part_bytes(np.float32),
            bigarray_bound_elems=bound,
        )
        assert found == expected


@pytest.mark.parametrize("hosts", ["aabab", "abcab", "aaabb", "abcde"])
@pytest.mark.parametrize("name", ["none", "momentum"])
def test_same_bits_on_several_hosts(name, hosts):
    """Each worker reaches servers of its host through memory, the others by messages; three workers, two servers."""
    changes = {"partition_bytes": part_bytes(np.float32), "bigarray_bound_elems": 20, "server_placement": "last"}
    expected = _bits(Mode("dist_sync", 3, 2, memory="off"), OPTIMIZERS[name], **changes)
    config = Mode("dist_sync", 3, 2).config(**changes)
    counts = {}

    def body(store):
        found = _body(OPTIMIZERS[name])(store)
        counts[store.rank] = store.stats().get("memory_bytes", 0)
        return found

    assert stores.spawn_stores("dist_sync", 3, body, num_servers=2, config=config, hosts=list(hosts)) == expected
    assert [counts[w] > 0 for w in range(3)] == [hosts[w] in hosts[3:] for w in range(3)]


@pytest.mark.parametrize("mode", [mode for mode in SERVED if mode.workers > 1], ids=mode_id)
def test_workers_may_use_different_call_forms(mode):
    """One pushes lists, another single keys in another order, in place or not, large and small."""
    keys = [str(n) for n in SIZES]
    W = mode.workers

    def body(store):
        store.set_optimizer(optimizers.create("test"))
        store.init(keys, [np.zeros(n, np.float32) for n in SIZES])
        for round_ in range(1, 4):
            mine = {key: values_of(n, store.rank, round_, np.float32) for key, n in zip(keys, SIZES, strict=True)}
            if store.rank == 0:
                store.pushpull(keys, list(mine.values()))
            else:
                order = np.random.default_rng([store.rank, round_]).permutation(keys).tolist()
                requests = []
                for i, key in enumerate(order):
                    if i % 3 == 0:
                        store.push(key, mine[key])
                    elif i % 3 == 1:
                        requests.append(store.pushpull_async(key, mine[key], priority=i))
                    else:
                        requests.append(store.pushpull_async([key], [mine[key]], [np.empty_like(mine[key])]))
                for request in requests:
                    request.wait()
            store.barrier()
        return [value.tolist() for value in store.pull(keys)]

    total = [sum(values_of(n, w, r, np.float32) for w in range(W) for r in (1, 2, 3)).tolist() for n in SIZES]
    assert mode.run(body, partition_bytes=part_bytes(np.float32), bigarray_bound_elems=NEVER) == [total] * W


def test_lists_meet_single_calls_without_waiting_for_each_other():
    """Blocking calls of single keys, in the other order, against one list."""

    def body(store):
        store.init(["a", "b", "c"], [np.zeros(3, np.float32), np.zeros(50, np.float32), np.zeros(2, np.float32)])
        arrays = {key: np.full(n, store.rank + 1.0, np.float32) for key, n in (("a", 3), ("b", 50), ("c", 2))}
        if store.rank == 0:
            store.pushpull(list(arrays), list(arrays.values()))
        else:
            for key in ("c", "b", "a"):
                store.pushpull(key, arrays[key])
        return [np.unique(value).tolist() for value in arrays.values()]

    assert Mode("dist_sync", 2, 1).run(body, partition_bytes=32) == [[[3.0]] * 3] * 2


# --- optimizers that come and go


@pytest.mark.parametrize("memory", ["auto", "off", "long"])
def test_units_follow_the_optimizer(memory):
    """Elementwise, whole, elementwise again, between rounds and with a round that only one worker has pushed."""
    n = 5 * PART_ELEMS + 3

    def run(partition_bytes):
        def body(store):
            numbers = np.random.default_rng(store.rank)
            store.init("w", np.linspace(-1, 1, n).astype(np.float32))
            found = []
            for round_, name in enumerate(("sgd", "lamb", "adam", "lamb", "adam")):
                early = numbers.standard_normal(n).astype(np.float32)
                if store.rank == round_ % 2:
                    store.push("w", early)
                store.set_optimizer(optimizers.create(name, learning_rate=0.05))
                if store.rank != round_ % 2:
                    store.push("w", early)
                for _ in range(2):
                    store.push("w", numbers.standard_normal(n).astype(np.float32))
                found.append(store.pull("w").tobytes())
            return found

        mode = Mode("dist_sync", 2, 1, memory=memory)
        return mode.run(body, partition_bytes=partition_bytes, bigarray_bound_elems=NEVER)

    whole = run(1 << 20)
    assert whole[0] == whole[1]
    assert run(part_bytes(np.float32)) == whole


def _saved(path, partition_bytes, servers, load=None):
    n = 4 * PART_ELEMS + 1

    def body(store):
        store.init("w", np.zeros(n, np.float32))
        store.set_optimizer(optimizers.create("adam", learning_rate=0.1))
        if load is not None:
            store.load_optimizer_states(load)
        for round_ in range(3):
            store.push("w", values_of(n, store.rank, round_, np.float32))
        store.save_optimizer_states(path)
        return store.pull("w").tobytes()

    Mode("dist_sync", 2, servers).run(body, partition_bytes=partition_bytes, bigarray_bound_elems=20)
    return states_file.load_states(path).entries["w"].state


def same_states(a, b):
    return set(a) == set(b) and all(np.array_equal(a[name], b[name]) for name in a)


def test_states_are_those_of_whole_values(tmp_path):
    """The count of updates above all; saved and loaded across other partitions and numbers of servers."""
    small, large = part_bytes(np.float32), 1 << 20
    first = _saved(tmp_path / "first", large, 1)
    assert first["t"] == 3
    second = _saved(tmp_path / "second", large, 1, tmp_path / "first")
    assert second["t"] == 6
    for servers in (1, 2, 3):
        for bytes_ in (small, 5 * small // 2):
            assert same_states(_saved(tmp_path / "x", bytes_, servers), first)
            assert same_states(_saved(tmp_path / "y", bytes_, servers, tmp_path / "first"), second)
            assert same_states(_saved(tmp_path / "z", large, 4 - servers, tmp_path / "x"), second)


# --- counts


@pytest.fixture
def fabric(monkeypatch):
    """The fabrics that are made: every message of every rank is counted in them."""
    made = []

    class Noted(Fabric):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(ranks, "Fabric", Noted)
    # Else who waits longer, on a busy machine, asks the others where they are, by messages that count as well.
    monkeypatch.setattr(cross_waits, "ASK_AFTER_S", float("inf"))
    return made


def _messages(fabric, workers, servers, sizes, call, *, shared_memory="off", **changes):
    """Messages and bytes of one `call(store, keys, arrays)` by every worker: those of three minus those of two."""
    changes["shared_memory"] = shared_memory
    counts = []
    for calls in (2, 3):

        def body(store, calls=calls):
            keys = [str(i) for i in range(len(sizes))]
            store.init(keys, [np.zeros(n, np.float32) for n in sizes])
            arrays = [np.ones(n, np.float32) for n in sizes]
            for _ in range(calls):
                call(store, keys, arrays)
                store.pull(keys[0]) if call is pushes else None
            return True

        assert all(Mode("dist_sync", workers, servers).run(body, **changes))
        counts.append((fabric[-1].sent_messages, fabric[-1].sent_bytes))
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


def pushes(store, keys, arrays):
    store.push(keys, arrays)


def together(store, keys, arrays):
    store.pushpull(keys, arrays)


def one_by_one(store, keys, arrays):
    for key, array in zip(keys, arrays, strict=True):
        store.pushpull(key, array)


SMALL = [5] * 40
WHOLE = {"bigarray_bound_elems": NEVER}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_small_keys_of_one_call_are_one_message_each_way(fabric, workers):
    payload = 40 * (wire.HEADER_BYTES + 32) - (32 - 20)  # each padded, all but the last
    answer = 40 * 20
    assert _messages(fabric, workers, 1, SMALL, together, **WHOLE) == (2 * workers, workers * (payload + answer))
    assert _messages(fabric, workers, 1, SMALL, one_by_one, **WHOLE)[0] == 2 * workers * 40


def test_small_keys_of_one_call_are_one_message_per_server(fabric):
    assert _messages(fabric, 2, 2, SMALL, together, **WHOLE)[0] == 2 * 2 * 2
    # A push is not answered; the pull of one key is a question and an answer.
    assert _messages(fabric, 2, 1, SMALL, pushes, **WHOLE)[0] == 2 * (1 + 2)


def test_a_large_value_is_a_header_and_its_partitions_each_way(fabric):
    n = 100
    changes = {"partition_bytes": 4 * 32, **WHOLE}
    parts = -(-n // 32)
    expected = (2 * (1 + 2 * parts), 2 * (wire.HEADER_BYTES + 2 * 4 * n))
    assert _messages(fabric, 2, 1, [n], together, **changes) == expected
    assert _messages(fabric, 2, 1, [n], one_by_one, **changes) == expected


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("in_place", [False, True], ids=["another array", "in place"])
def test_few_of_many_partitions_are_under_way_at_a_time(name, in_place, monkeypatch):
    """MPI looks through all that is under way for each message, so that thousands would take minutes."""
    most = 0

    class Watched(Fabric):
        def rank(self, rank):
            transport = super().rank(rank)
            isend, irecv = transport.isend, transport.irecv

            def watch(request):
                nonlocal most
                with self.lock:
                    most = max(most, *map(len, self.boxes[rank].receives.values()), len(unsent()))
                return request

            def unsent():
                sends[:] = [one for one in sends if not one.done]
                return sends

            def send(buf, dest, tag):
                request = isend(buf, dest, tag)
                if tag >= wire.TAG_PAYLOAD:
                    sends.append(request)
                return watch(request)

            sends = []
            transport.isend, transport.irecv = send, lambda *args: watch(irecv(*args))
            return transport

    monkeypatch.setattr(ranks, "Fabric", Watched)
    monkeypatch.setattr(threads, "EAGER_BYTES", 0)  # a short message is done when it has left, and tells nothing
    monkeypatch.setattr(on_servers, "SHORT_PARTITION_BYTES", 1)  # else only a value of many MB is cut into so many
    n, workers = 20 * exchange.PARTS_UNDER_WAY, 3

    def body(store):
        store.set_optimizer(optimizers.create("test"))
        store.init(["w", "v"], [np.zeros(n, np.float32), np.zeros(3, np.float32)])
        value = np.full(n, store.rank + 1, np.float32)
        out = value if in_place else np.empty(n, np.float32)
        store.pushpull(["w", "v"], [value, np.ones(3, np.float32)], out=[out, np.empty(3, np.float32)])
        store.barrier()
        return np.unique(store.pull("w")).tolist(), store.pull("v").tolist()

    config = Config(partition_bytes=4, shared_memory="off", timeout_s=stores.TEST_TIMEOUT_S)
    found = stores.spawn_stores(name, workers, body, num_servers=1, config=config)
    assert found == [([6.0], [3.0] * 3)] * workers
    assert 0 < most <= exchange.PARTS_UNDER_WAY + 3  # of each shard: the other one has three


@pytest.mark.parametrize("call", [together, one_by_one, pushes], ids=lambda call: call.__name__)
def test_nothing_of_it_leaves_as_a_message_where_memory_is_shared(fabric, call):
    assert _messages(fabric, 2, 2, [5, 100, 1000, 100_000], call, shared_memory="auto") == (0, 0)


def test_messages_of_many_small_keys_are_cut(fabric, monkeypatch):
    monkeypatch.setattr(exchange, "MESSAGE_BYTES", 1000)
    per_message = -(-1001 // (wire.HEADER_BYTES + 20))
    assert _messages(fabric, 1, 1, SMALL, together, **WHOLE)[0] == 2 * -(-40 // per_message)


@pytest.mark.grid
@pytest.mark.parametrize("memory", ["auto", "off", "long"])
@pytest.mark.parametrize("name", ["none", "test", "lamb"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_memory_of_a_server(monkeypatch, workers, name, memory):
    """Values, and one gradient per worker at most, though one worker is many rounds ahead of the others."""
    cores, made = [], assembly.ServerCore

    def noted(*arguments, **options):
        cores.append(made(*arguments, **options))
        return cores[-1]

    monkeypatch.setattr(assembly, "ServerCore", noted)
    n = 50 * PART_ELEMS + 3

    def body(store):
        store.init("w", np.zeros(n, np.float32))
        if name != "none":
            store.set_optimizer(optimizers.create(name))
        if store.rank == workers - 1:
            for _ in range(6):
                store.push("w", np.ones(n, np.float32))
        store.barrier()
        if store.rank != workers - 1:
            for _ in range(6):
                store.push("w", np.ones(n, np.float32))
        for _ in range(3):
            store.pushpull("w", np.ones(n, np.float32))
        return True

    mode = Mode("dist_sync", workers, 1, memory=memory)
    mode.run(body, partition_bytes=part_bytes(np.float32), bigarray_bound_elems=NEVER)
    (core,) = cores
    assert core.pool.held_bytes <= 4 * n * (1 + workers)


# --- waits for several keys at once


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_a_worker_that_leaves_ends_the_wait_for_a_later_key(asynchronous):
    """The keys of a list are waited for together; the one that cannot come is not the first."""

    def body(store):
        store.init(["a", "b"], [np.zeros(2, np.float32), np.zeros(60, np.float32)])
        if store.rank == 1:
            store.pushpull("a", np.ones(2, np.float32))
            store.close()
            return True
        arrays = [np.ones(2, np.float32), np.ones(60, np.float32)]
        with pytest.raises(PeerError, match=r"key 'b', round 1.*worker 1"):
            store.pushpull_async(["a", "b"], arrays).wait() if asynchronous else store.pushpull(["a", "b"], arrays)
        return True

    assert Mode("dist_sync", 2, 1).run(body, partition_bytes=32) == [True, True]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_a_stall_names_the_key_that_is_missing(asynchronous):
    """And the call, which its caller has given up, goes on all the same."""
    told = threading.Event()
    missing = r"key 'b', round 1\. Not arrived: worker 1.*pushed it 0 times"

    def body(store):
        store.init(["a", "b"], [np.zeros(2, np.float32), np.zeros(3, np.float32)])
        arrays = [np.ones(2, np.float32), np.ones(3, np.float32)]
        if store.rank == 1:
            store.push("a", arrays[0])
            assert told.wait(20)
            store.pushpull("b", arrays[1])
        elif asynchronous:
            request = store.pushpull_async(["a", "b"], arrays)
            with pytest.raises(StallError, match=missing):
                request.wait(timeout_s=0.3)
            told.set()
            request.wait()
        else:
            with pytest.raises(StallError, match=missing):
                store.pushpull(["a", "b"], arrays)
            told.set()
            store.pull("b")
            deadline = time.monotonic() + 20
            while arrays[1][0] == 1 and time.monotonic() < deadline:
                time.sleep(0.01)
        return np.unique(arrays[1]).tolist()

    assert Mode("dist_sync", 2, 1).run(body, timeout_s=20 if asynchronous else 2) == [[2.0], [2.0]]
