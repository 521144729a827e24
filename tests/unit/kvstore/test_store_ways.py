"""Keys of one store that go different ways, each as its placement says, through the checks of mpikv.testing.paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from store_modes import Mode

from mpikv import KVStore, optimizers
from mpikv.config import Config
from mpikv.placement.place import place
from mpikv.strategies import placed_keys
from mpikv.strategies.host_keys import HostKeys
from mpikv.testing.paths import LONG, check_path

F32 = np.float32
LAYOUTS = pytest.mark.parametrize("hosts", ["aaa", "aab", "abab"])


def paths_of(store: KVStore) -> dict[Any, str]:
    return {queue.info.key: queue.placement.path for queue in store.strategy._queues.values()}


def check(hosts: str, afterwards: Callable[[KVStore], None]) -> None:
    def run(body: Callable[[KVStore], Any]) -> Any:
        def checked(store: KVStore) -> Any:
            found = body(store)
            afterwards(store)
            return found

        return Mode("dist_sync", len(hosts), hosts=hosts).run(checked)

    check_path(run, len(hosts), dtypes=["float32", "int8"])


def without_room_from(n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the host has no room for keys of so many bytes or more."""
    before = HostKeys.reserve_key
    monkeypatch.setattr(
        HostKeys,
        "reserve_key",
        lambda hosts, wanted, **named: None if wanted >= n_bytes else before(hosts, wanted, **named),
    )


@LAYOUTS
def test_keys_that_the_memory_has_no_room_for_go_by_messages(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_room_from(4 * LONG[0], monkeypatch)
    usual = "direct" if len(set(hosts)) == 1 else "hosted"

    def afterwards(store: KVStore) -> None:
        paths = paths_of(store)
        assert paths.pop("long") == "messages"
        assert set(paths.values()) == {usual}
        assert 0 < store.stats()["shared_bytes"] < 4 * LONG[0]

    check(hosts, afterwards)


@LAYOUTS
def test_a_placement_of_each_key_alone(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By different algorithms, too, in one call; also after the owners have changed."""
    algorithms = ("ring", "naive", "halving_doubling", "")  # "": as it would go without this test

    def by_messages(members: Any, info: Any, **named: Any) -> Any:
        found = place(members, info, **named)
        algorithm = algorithms[info.id % 4]
        if not algorithm:
            return found
        alone = members.__class__(members.hosts, members.workers, config=Config(algorithm=algorithm))
        by_hand = place(alone, info, **named)
        assert (by_hand.path, by_hand.algorithm) == ("messages", algorithm)
        return by_hand

    monkeypatch.setattr(placed_keys, "place", by_messages)

    def afterwards(store: KVStore) -> None:
        assert len(set(paths_of(store).values())) == 2
        store.set_optimizer(optimizers.create("lamb"))  # of keys that one owner has whole
        store.pushpull("float32 (37,)", np.ones(37, F32))

    check(hosts, afterwards)


@pytest.mark.parametrize("hosts", ["aab", "aabb"])
def test_a_bucket_goes_its_own_way(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys went another way before."""
    without_room_from(400, monkeypatch)
    sizes, W = (30, 31, 50), len(hosts)

    def body(store: KVStore) -> None:
        store.init([0, 1, 2], [np.zeros(size, F32) for size in sizes])
        assert set(paths_of(store).values()) == {"hosted"}
        store.strategy.bucket([0, 1, 2])
        assert set(paths_of(store).values()) == {"messages"}
        for step in range(3):
            store.push([0, 1, 2], [np.arange(size, dtype=F32) * (store.rank + step) for size in sizes])
        for size, value in zip(sizes, store.pull([0, 1, 2]), strict=True):
            assert value.tolist() == [i * sum(range(2, W + 2)) for i in range(size)]

    Mode("dist_sync", W, hosts=hosts).run(body)
