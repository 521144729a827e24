"""Many keys between hosts in any order: the same bits, so many messages, the first ones first, and no deadlock."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from on_workers import on, uniform
from store_modes import Mode

from mpikv import optimizers
from mpikv.kvstore import KVStore
from mpikv.transports import wire
from mpikv.transports.base import Transport
from mpikv.transports.threads import Fabric, ThreadTransport

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


class Two(NamedTuple):
    """Two hosts with a worker each, what each has sent, and how they wait for each other beside the store."""

    fabric: LoggedFabric
    together: threading.Barrier

    def run(self, body: Callable[..., Any]) -> None:
        Mode("dist_sync", 2, hosts="ab").run(
            lambda store: body(store, self.fabric.left[store.rank]), fabric=self.fabric, progress="calls"
        )


@pytest.fixture
def two() -> Two:
    return Two(LoggedFabric(["a", "b"]), threading.Barrier(2))


def test_a_list_of_small_keys_is_one_message_for_each_half_of_the_round(two: Two) -> None:
    def body(store: KVStore, log: list[int]) -> None:
        keys, arrays = list(range(MANY)), [np.full(9, i, np.float32) for i in range(MANY)]
        store.init(keys, arrays)
        store.barrier()
        two.together.wait()
        before = len(log)
        request = store.pushpull_async(keys, arrays)
        two.together.wait()
        assert log[before:] == [wire.TAG_BUNDLES]
        request.wait()
        assert log[before:] == [wire.TAG_BUNDLES] * 2
        assert all((array == 2 * i).all() for i, array in enumerate(arrays))
        two.together.wait()

    two.run(body)


def test_a_key_of_higher_priority_leaves_first_though_it_came_last(two: Two) -> None:
    def body(store: KVStore, log: list[int]) -> None:
        big, first = np.ones(10 * LONG, np.float32), np.ones(LONG, np.float32)
        store.init(["big", "first"], [big, first])
        store.pushpull("first", first.copy(), priority=1)  # from the first priority on, what comes first is chosen
        store.barrier()
        two.together.wait()  # a worker that is still in the barrier would take in what another one asks for
        before = len(log)
        store.push("big", big)
        store.push("first", first, priority=1)
        two.together.wait()  # what both ask for is on its way, and nothing else yet
        assert uniform(store.pull("big")) == uniform(store.pull("first")) == 2
        ids = {store.session.infos[key].id: key for key in ("big", "first")}
        left = [ids[key] for key in map(wire.key_of, log[before:]) if key in ids]
        assert left[:2] == ["first"] * 2
        assert (left.count("first"), left.count("big")) == (4, 40)

    two.run(body)


@on(Mode("dist_sync", 2, hosts="ab"))
def test_workers_in_opposite_orders_that_wait_for_one_key_before_they_push_the_next(store: KVStore) -> None:
    """Key 0 fills every window of worker 0, and worker 1 does not push it before it has key 1."""
    values = [np.full(60 * LONG, 1, np.float32), np.full(LONG, 2, np.float32)]
    store.init([0, 1], values)
    for key in (0, 1) if store.rank == 0 else (1, 0):
        store.push(key, values[key], priority=0 if key else 5)
        if store.rank == 1 or key == 1:
            assert uniform(store.pull(key)) == 2 + 2 * key
    assert uniform(store.pull(0)) == 2


# --- the same bits, whatever the calls

SIZES, DTYPES = (0, 1, 7, 300, 1001, 20_001), (np.float32, np.float64, np.float16, np.int32)
KEYS = {i: (n, DTYPES[i % 4]) for i, n in enumerate(SIZES)}


def exchange(store: KVStore, call: str, dice: random.Random, arrays: dict[int, Any]) -> None:
    """In an order of this worker's own but where the call says so."""
    order = dice.sample([*KEYS], len(KEYS))
    if call == "one after another":
        for key in KEYS:
            store.pushpull(key, arrays[key])
    elif call == "one call":
        store.pushpull(order, [arrays[key] for key in order], priority=dice.randint(-3, 3))
    elif call == "requests":
        requests = [store.pushpull_async(key, arrays[key], priority=dice.randint(-3, 3)) for key in order]
        for request in dice.sample(requests, len(requests)):
            request.wait()
    else:
        for some in (order[:2], order[2:]):
            store.push(some, [arrays[key] for key in some], priority=dice.randint(-3, 3))
        for key in dice.sample(order, len(order)):
            store.pull(key, out=arrays[key], priority=dice.randint(-3, 3))


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("bucket_bytes", [0, 256, 61440])
@pytest.mark.parametrize(("hosts", "memory"), [("abc", "off"), ("aab", "auto"), ("ababb", "off")])
def test_the_bits_are_those_of_one_key_after_another(
    hosts: str, memory: str, bucket_bytes: int, optimizer: bool
) -> None:
    def results(calls: list[str], bucket_bytes: int) -> list[list[bytes]]:
        def body(store: KVStore) -> list[bytes]:
            dice, found = random.Random(store.rank), list[bytes]()
            dtypes = {key: np.float32 if optimizer else dtype for key, (_, dtype) in KEYS.items()}
            store.init([*KEYS], [np.ones(n, dtypes[key]) for key, (n, _) in KEYS.items()])
            if optimizer:
                store.set_optimizer(optimizers.create("sgd", learning_rate=0.1, momentum=0.9))
            for round_ in range(4):
                numbers = np.random.default_rng([round_, store.rank])
                arrays = {key: (numbers.standard_normal(n) * 10).astype(dtypes[key]) for key, (n, _) in KEYS.items()}
                exchange(store, calls[(round_ + store.rank) % len(calls)], dice, arrays)
                found += [array.tobytes() for array in arrays.values()]
            return found

        return Mode("dist_sync", len(hosts), memory=memory, hosts=hosts).run(body, bucket_bytes=bucket_bytes)

    expected = results(["one after another"], 0)
    assert results(["one call", "requests", "lists"], bucket_bytes) == expected == expected[:1] * len(hosts)
