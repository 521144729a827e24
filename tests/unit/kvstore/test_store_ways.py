"""Keys of one store that go different ways, each as its placement says: the values are those of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpikv import KVStore, optimizers
from mpikv.config import Config
from mpikv.placement.place import place
from mpikv.strategies import placed_keys
from mpikv.strategies.host_keys import HostKeys
from mpikv.testing.reference import ReferenceStore
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

F32 = np.float32
SIZES = {"small": 1, "empty": 0, "odd": 77, "long": 70_001}
LAYOUTS = pytest.mark.parametrize("hosts", ["aaa", "aab", "abab"])
STEPS = 3


def values_of(rank: int, step: int, size: int) -> Any:
    """Whole numbers, whose sums are exact in any order."""
    return np.random.default_rng([rank, step, size]).integers(-1000, 1000, size).astype(F32)


def paths_of(store: KVStore) -> dict[Any, str]:
    return {queue.info.key: queue.placement.path for queue in store.strategy._queues.values()}


def every_call(store: KVStore) -> list[bytes]:
    """All keys in every kind of call, together and one by one; what the store gives."""
    keys = [*SIZES]
    outs = [np.empty(SIZES[key], F32) for key in keys]
    shared = store.zeros([(SIZES[key],) for key in keys])
    found: list[bytes] = []
    for step in range(STEPS):
        values = [values_of(store.rank, step, SIZES[key]) for key in keys]
        store.push(keys, values)
        found += [store.pull(key).tobytes() for key in keys]
        store.pushpull(keys, values, outs)
        found += [out.tobytes() for out in outs]
        for value, array in zip(values, shared, strict=True):
            array[...] = value
        store.pushpull(keys, shared)
        found += [array.tobytes() for array in shared]
        for key in keys if store.rank % 2 else reversed(keys):
            store.push(key, values[keys.index(key)])
        requests = [store.pushpull_async(key, value) for key, value in zip(keys, values, strict=True)]
        for request in requests:
            request.wait()
        found += [value.tobytes() for value in values]
    return found


def expected(n_workers: int, update: Any = None) -> list[bytes]:
    """The same calls of the reference store."""
    reference = ReferenceStore(n_workers, update=update)
    for key, size in SIZES.items():
        reference.init(key, np.full(size, 2, F32))
    found: list[bytes] = []
    for step in range(STEPS):
        for round_ in range(5):
            for key, size in SIZES.items():
                for worker in range(n_workers):
                    reference.push(worker, key, [values_of(worker, step, size)])
            if round_ != 3:  # two rounds are under way before anybody pulls
                found += [reference.pull(0, key).tobytes() for key in SIZES]
    return found


def run(hosts: str, body: Any) -> list[Any]:
    return spawn_stores("dist_sync", len(hosts), body, hosts=hosts, config=Config(timeout_s=TEST_TIMEOUT_S))


def without_room_from(n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the host has no room for keys of so many bytes or more."""
    before = HostKeys.reserve_key
    monkeypatch.setattr(
        HostKeys,
        "reserve_key",
        lambda hosts, wanted, **named: None if wanted >= n_bytes else before(hosts, wanted, **named),
    )


@LAYOUTS
@pytest.mark.parametrize("updated", [False, True], ids=["sums", "optimizer"])
def test_keys_that_the_memory_has_no_room_for_go_by_messages(
    hosts: str, updated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room_from(4 * SIZES["long"], monkeypatch)
    usual = "direct" if len(set(hosts)) == 1 else "hosted"

    def body(store: KVStore) -> Any:
        store.init([*SIZES], [np.full(size, 2, F32) for size in SIZES.values()])
        assert paths_of(store) == dict.fromkeys(SIZES, usual) | {"long": "messages"}
        if updated:
            store.set_optimizer(optimizers.create("sgd", learning_rate=0.5))
        found = every_call(store)
        assert store.stats()["shared_bytes"] == 4 * sum(size for size in SIZES.values() if size < SIZES["long"])
        return found

    update = (lambda weight, total: weight - F32(0.5) * total) if updated else None
    assert run(hosts, body) == [expected(len(hosts), update)] * len(hosts)


@LAYOUTS
def test_a_placement_of_each_key_alone(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By different algorithms, too, in one call; also after the owners have changed."""
    algorithms = dict(zip(SIZES, ("ring", "naive", "halving_doubling", "ring"), strict=True))

    def by_messages(members: Any, info: Any, **named: Any) -> Any:
        found = place(members, info, **named)
        if info.key == "small":
            return found
        config = Config(algorithm=algorithms[info.key])
        by_hand = place(members.__class__(members.hosts, members.workers, config=config), info, **named)
        assert (by_hand.path, by_hand.algorithm) == ("messages", algorithms[info.key])
        return by_hand

    monkeypatch.setattr(placed_keys, "place", by_messages)

    def body(store: KVStore) -> Any:
        store.init([*SIZES], [np.full(size, 2, F32) for size in SIZES.values()])
        found = every_call(store)
        assert len(set(paths_of(store).values())) == 2
        store.set_optimizer(optimizers.create("lamb"))  # of keys that one owner has whole
        store.pushpull("odd", np.ones(SIZES["odd"], F32))
        return found

    assert run(hosts, body) == [expected(len(hosts))] * len(hosts)


@pytest.mark.parametrize("hosts", ["aab", "aabb"])
def test_a_bucket_goes_its_own_way(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys went another way before."""
    without_room_from(400, monkeypatch)
    sizes = (30, 31, 50)

    def body(store: KVStore) -> Any:
        store.init([0, 1, 2], [np.zeros(size, F32) for size in sizes])
        assert set(paths_of(store).values()) == {"hosted"}
        store.strategy.bucket([0, 1, 2])
        assert set(paths_of(store).values()) == {"messages"}
        for step in range(STEPS):
            store.push([0, 1, 2], [values_of(store.rank, step, size) for size in sizes])
        return [value.tobytes() for value in store.pull([0, 1, 2])]

    sums = [sum(values_of(rank, STEPS - 1, size) for rank in range(len(hosts))).tobytes() for size in sizes]
    assert run(hosts, body) == [sums] * len(hosts)
