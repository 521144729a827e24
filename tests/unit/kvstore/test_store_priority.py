"""Many keys between hosts in any order: the same bits, so many messages, the first ones first, and no deadlock."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpikv import optimizers
from mpikv.config import Config
from mpikv.errors import StallError
from mpikv.kvstore import KVStore
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores
from mpikv.transports import wire
from mpikv.transports.base import Transport
from mpikv.transports.threads import Fabric, ThreadTransport

BY_CALLS = Config(progress="calls", timeout_s=TEST_TIMEOUT_S)
MANY = 100
LONG = 61_440  # values: two whole segments for each of two ranks


class LoggedFabric(Fabric):
    """left: by rank, the tags of what was sent, in order."""

    def __init__(self, hosts: list[str]) -> None:
        super().__init__(len(hosts), hosts)
        self.left: list[list[int]] = [[] for _ in hosts]

    def rank(self, rank: int) -> Transport:
        log = self.left[rank]

        class Logged(ThreadTransport):
            def isend(self, buf: Any, dest: int, tag: int, room_bytes: int = 0) -> Any:
                log.append(tag)
                return super().isend(buf, dest, tag, room_bytes)

        return Logged(self, rank)


def test_a_list_of_small_keys_is_one_message_for_each_half_of_the_round() -> None:
    fabric, together = LoggedFabric(["a", "b"]), threading.Barrier(2)

    def body(store: KVStore) -> list[int]:
        keys, arrays = [f"w{i}" for i in range(MANY)], [np.full(9, i, np.float32) for i in range(MANY)]
        store.init(keys, arrays)
        store.barrier()
        log = fabric.left[store.rank]
        together.wait()
        before = len(log)
        request = store.pushpull_async(keys, arrays)
        together.wait()
        assert log[before:] == [wire.TAG_BUNDLES]
        request.wait()
        sent = log[before:]
        assert all((array == 2 * i).all() for i, array in enumerate(arrays))
        together.wait()
        return sent

    assert (
        spawn_stores("dist_sync", 2, body, config=BY_CALLS, fabric=fabric, hosts=fabric.hosts)
        == [[wire.TAG_BUNDLES] * 2] * 2
    )


def test_a_key_of_higher_priority_leaves_first_though_it_came_last() -> None:
    fabric, together = LoggedFabric(["a", "b"]), threading.Barrier(2)

    def body(store: KVStore) -> list[str]:
        big, first = np.ones(10 * LONG, np.float32), np.ones(LONG, np.float32)
        store.init(["big", "first"], [big, first])
        store.pushpull("first", first.copy(), priority=1)  # from the first priority on, what comes first is chosen
        store.barrier()
        together.wait()  # a worker that is still in the barrier would take in what another one asks for
        before = len(fabric.left[store.rank])
        store.push("big", big)
        store.push("first", first, priority=1)
        together.wait()  # what both ask for is on its way, and nothing else yet
        assert (store.pull("big") == 2).all()
        assert (store.pull("first") == 2).all()
        ids = {store.session.infos[key].id: key for key in ("big", "first")}
        return [ids.get(wire.key_of(tag), "") for tag in fabric.left[store.rank][before:]]

    for names in spawn_stores("dist_sync", 2, body, config=BY_CALLS, fabric=fabric, hosts=fabric.hosts):
        left = [name for name in names if name]
        assert left[:2] == ["first"] * 2
        assert left.count("first") == 4
        assert left.count("big") == 40


def test_workers_in_opposite_orders_that_wait_for_one_key_before_they_push_the_next() -> None:
    """Key 0 fills every window of worker 0, and worker 1 does not push it before it has key 1."""

    def body(store: KVStore) -> None:
        values = [np.full(60 * LONG, 1, np.float32), np.full(LONG, 2, np.float32)]
        store.init([0, 1], values)
        for key in (0, 1) if store.rank == 0 else (1, 0):
            store.push(key, values[key], priority=0 if key else 5)
            if store.rank == 1 or key == 1:
                assert (store.pull(key) == 2 * values[key]).all()
        assert (store.pull(0) == 2).all()

    spawn_stores("dist_sync", 2, body, hosts=["a", "b"])


def test_a_stall_names_the_key_that_was_not_pushed() -> None:
    def body(store: KVStore) -> None:
        values = [np.ones(LONG, np.float32), np.ones(4, np.float32)]
        store.init(["there", "late"], values)
        store.push("there", values[0])
        if store.rank == 0:
            store.push("late", values[1], priority=7)
        store.pull("there")
        store.pull("late") if store.rank == 0 else store.barrier()

    with pytest.raises(RankError) as raised:
        spawn_stores("dist_sync", 2, body, hosts=["a", "b"], config=Config(timeout_s=1))
    error = raised.value.errors[0]
    assert isinstance(error, StallError)
    assert "'late'" in str(error)


# --- the same bits, whatever the calls

DTYPES = [np.float32, np.float64, np.float16, np.int32]
KEYS = 8


def arrays_of(rank: int, round_: int, sizes: list[int]) -> list[Any]:
    dice = np.random.default_rng(100 * round_ + rank)
    return [
        (dice.standard_normal(size) * 10).astype(DTYPES[i % len(DTYPES)] if i % 3 else np.float32)
        for i, size in enumerate(sizes)
    ]


def by_lists(store: KVStore, dice: random.Random, arrays: list[Any]) -> None:
    """Pieces of a shuffled list, in one call each, and read in another order."""
    order = dice.sample(range(KEYS), KEYS)
    while order:
        some = [order.pop() for _ in range(min(len(order), dice.randint(1, 6)))]
        store.push(some, [arrays[i] for i in some], priority=dice.randint(-3, 3))
    for i in dice.sample(range(KEYS), KEYS):
        store.pull(i, out=arrays[i], priority=dice.randint(-3, 3))


def by_requests(store: KVStore, dice: random.Random, arrays: list[Any]) -> None:
    """Key by key without blocking, and waited for in another order."""
    order = dice.sample(range(KEYS), KEYS)
    requests = [store.pushpull_async(i, arrays[i], priority=dice.randint(-3, 3)) for i in order]
    for request in dice.sample(requests, KEYS):
        request.wait()


def by_one_call(store: KVStore, dice: random.Random, arrays: list[Any]) -> None:
    """All keys, in an order of this worker's own."""
    order = dice.sample(range(KEYS), KEYS)
    store.pushpull(order, [arrays[i] for i in order], priority=dice.randint(-3, 3))


def in_order(store: KVStore, dice: random.Random, arrays: list[Any]) -> None:
    """The reference: one key after another."""
    for i, array in enumerate(arrays):
        store.pushpull(i, array)


WAYS: list[Callable[[KVStore, random.Random, list[Any]], None]] = [by_lists, by_requests, by_one_call]


def rounds(
    hosts: list[str], seed: int, config: Config, ways: list[Callable[..., None]], *, optimizer: bool
) -> list[bytes]:
    """Two rounds; each worker picks a way for each of them. Returns every worker's results."""
    dice = random.Random(seed)
    sizes = [dice.choice([0, 1, 7, 65, 300, 1001, 20_001]) for _ in range(KEYS)]

    def body(store: KVStore) -> bytes:
        own = random.Random(f"{seed} {store.rank}")
        values = arrays_of(99, 0, sizes)
        if optimizer:
            values = [value.astype(np.float32) for value in values]
        store.init(list(range(KEYS)), values)
        if optimizer:
            store.set_optimizer(optimizers.create("sgd", learning_rate=0.1, momentum=0.9))
        found = b""
        for round_ in range(2):
            arrays = [
                array.astype(value.dtype)
                for array, value in zip(arrays_of(store.rank, round_, sizes), values, strict=True)
            ]
            own.choice(ways)(store, own, arrays)
            found += b"".join(array.tobytes() for array in arrays)
        return found

    return spawn_stores("dist_sync", len(hosts), body, hosts=hosts, config=config)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("bucket_bytes", [0, 256, 61440])
@pytest.mark.parametrize("memory", ["auto", "off"])
@pytest.mark.parametrize("hosts", ["ab", "abc", "abcde", "aab", "ababb"])
@pytest.mark.grid
def test_the_bits_are_those_of_one_key_after_another(
    hosts: str, memory: str, bucket_bytes: int, seed: int, *, optimizer: bool
) -> None:
    config = Config(shared_memory=memory, timeout_s=TEST_TIMEOUT_S)
    expected = rounds(list(hosts), seed, config.with_(bucket_bytes=0), [in_order], optimizer=optimizer)
    found = rounds(list(hosts), seed, config.with_(bucket_bytes=bucket_bytes), WAYS, optimizer=optimizer)
    assert found == expected
    assert len(set(found)) == 1
