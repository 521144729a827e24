"""Many keys between hosts in any order: the same bits, so many messages, and no deadlock."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from on_workers import counted, on, uniform
from store_modes import Mode

from mpikv import optimizers
from mpikv.kvstore import KVStore

MANY = 100
LONG = 61_440  # values: two whole segments for each of two ranks


@on(Mode("dist_sync", 2, 0, "owners", hosts="ab"))
def test_a_list_of_small_keys_is_one_message_to_each_owner(store: KVStore) -> None:
    keys = list(range(MANY))
    arrays = [np.full(9, i, np.float32) for i in keys]
    store.init(keys, arrays)

    def call() -> None:
        store.pushpull(keys, arrays)
        store.barrier()  # until this worker has answered the other one

    # A request and an answer, and one for the barrier.
    assert counted(store, call, "messages_sent", "control_messages_sent") == [3, 1]
    assert all((array == 2 * i).all() for i, array in enumerate(arrays))


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
@pytest.mark.parametrize(("hosts", "memory"), [("abc", "off"), ("aab", "auto"), ("ababb", "off")])
def test_the_bits_are_those_of_one_key_after_another(hosts: str, memory: str, optimizer: bool) -> None:
    def results(calls: list[str]) -> list[list[bytes]]:
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

        return Mode("dist_sync", len(hosts), memory=memory, hosts=hosts).run(body)

    expected = results(["one after another"])
    assert results(["one call", "requests", "lists"]) == expected == expected[:1] * len(hosts)
