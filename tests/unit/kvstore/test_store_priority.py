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
from mpikv.errors import StallError
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


@on(Mode("dist_sync", 2, hosts="ab"), timeout_s=1)
def test_a_stall_names_the_key_that_was_not_pushed(store: KVStore, told: threading.Event) -> None:
    values = [np.ones(LONG, np.float32), np.ones(4, np.float32)]
    store.init(["there", "late"], values)
    store.push("there", values[0])
    if store.rank == 0:
        store.push("late", values[1], priority=7)
    store.pull("there")
    if store.rank == 0:
        with pytest.raises(StallError, match="'late'"):
            store.pull("late")
        told.set()
    else:
        assert told.wait(20)
        store.push("late", values[1])


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
    mode: Mode, seed: int, bucket_bytes: int, ways: list[Callable[..., None]], *, optimizer: bool
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
            arrays = arrays_of(store.rank, round_, sizes)
            arrays = [array.astype(value.dtype) for array, value in zip(arrays, values, strict=True)]
            own.choice(ways)(store, own, arrays)
            found += b"".join(array.tobytes() for array in arrays)
        return found

    return mode.run(body, bucket_bytes=bucket_bytes)


HOSTS = ("ab", "abc", "abcde", "aab", "ababb")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("bucket_bytes", [0, 256, 61440])
@on(*[Mode("dist_sync", len(hosts), memory=memory, hosts=hosts) for memory in ("auto", "off") for hosts in HOSTS])
@pytest.mark.grid
def test_the_bits_are_those_of_one_key_after_another(
    mode: Mode, bucket_bytes: int, seed: int, *, optimizer: bool
) -> None:
    expected = rounds(mode, seed, 0, [in_order], optimizer=optimizer)
    assert rounds(mode, seed, bucket_bytes, WAYS, optimizer=optimizer) == expected == expected[:1] * mode.workers
