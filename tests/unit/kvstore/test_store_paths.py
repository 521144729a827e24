"""Every path that a gradient can go, on thread ranks, through the checks of mpikv.testing.paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from store_modes import ADDING, ASYNC, FEW_ON_DEVICE, LOCAL, SYNC, Mode, every_way, mode_id

from mpikv import KVStore, optimizers
from mpikv.config import Config
from mpikv.placement.place import place
from mpikv.strategies import placed_keys
from mpikv.strategies.client_key import ClientKey
from mpikv.strategies.host_keys import HostKeys
from mpikv.testing.paths import DTYPES, LONG, check_path
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

# A mode has one part in every run, with a long key, and all of them with --full.
PARTS = pytest.mark.parametrize("dtypes", [DTYPES[part::4] for part in range(4)], ids=str)
HOSTS = ("aab", "aabb", "abab", "aaab", "aabbc", "abc")


def check(mode: Mode, dtypes: Any, path: str | None = None, **changes: Any) -> None:
    check_path(
        lambda body: mode.run(body, **changes), mode.workers, dtypes=dtypes, synchronous=mode.synchronous, path=path
    )


@pytest.mark.grid
@PARTS
@pytest.mark.parametrize("mode", [*SYNC, *FEW_ON_DEVICE, Mode("dist_sync", 3, codec="reversed")], ids=mode_id)
def test_synchronous_stores(mode: Mode, dtypes: Any) -> None:
    check(mode, dtypes)


@pytest.mark.grid
@PARTS
@pytest.mark.parametrize("mode", ASYNC, ids=mode_id)
def test_asynchronous_stores(mode: Mode, dtypes: Any) -> None:
    check(mode, dtypes)


@pytest.mark.parametrize("bound_elems", [8, 10**9], ids=["cut", "whole"])
@pytest.mark.parametrize(
    "mode", every_way(Mode("dist_sync", 1, 1), Mode("dist_sync", 3, 2), Mode("dist_async", 2)), ids=mode_id
)
def test_values_in_partitions(mode: Mode, bound_elems: int) -> None:
    check(mode, ["float32", "int64"], partition_bytes=1000, bigarray_bound_elems=bound_elems)


@pytest.mark.grid
@PARTS
@pytest.mark.parametrize("memory", ["auto", "off"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_several_hosts(hosts: str, memory: str, dtypes: Any) -> None:
    config = Config(timeout_s=TEST_TIMEOUT_S, shared_memory=memory)
    path = "hosted" if memory == "auto" and len(set(hosts)) < len(hosts) else None
    check_path(
        lambda body: spawn_stores("dist_sync", len(hosts), body, hosts=hosts, config=config),
        len(hosts),
        dtypes=dtypes,
        path=path,
    )


@pytest.mark.parametrize(
    ("mode", "path"),
    [
        (Mode("dist_sync", 3), "direct"),
        (Mode("dist_sync", 3, memory="off"), "messages"),
        (Mode("dist_sync", 3, codec="reversed"), "encoded"),
        (Mode("dist_sync", 3, device="staged"), "staged"),
        (Mode("dist_sync", 3, device="ipc"), "ipc"),
        (Mode("dist_sync", 3, 0, "ring", device="mpi"), "mpi"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_the_path_that_is_meant(mode: Mode, path: str) -> None:
    check(mode, ["float32"], path)


@pytest.mark.parametrize("progress", ["thread", "calls"])
@pytest.mark.parametrize("mode", [Mode("dist_sync", 3), Mode("dist_sync", 2, 2), Mode("dist_async", 2)], ids=mode_id)
def test_with_and_without_a_progress_thread(mode: Mode, progress: str) -> None:
    check(mode, ["float32", "int8"], progress=progress)


@pytest.mark.parametrize(
    "mode", [Mode("dist_sync_device", 2), Mode("dist_device_sync", 2, 1), Mode("dist", 2), *LOCAL], ids=mode_id
)
def test_other_names_of_the_synchronous_store(mode: Mode) -> None:
    check(mode, ["float32"])


# --- keys of one store that go different ways


F32 = np.float32
LAYOUTS = pytest.mark.parametrize("hosts", ["aaa", "aab", "abab"])


def paths_of(store: KVStore) -> dict[Any, str]:
    return {queue.info.key: queue.placement.path for queue in store.strategy._queues.values()}


def check_on_hosts(hosts: str, afterwards: Callable[[KVStore], None]) -> None:
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

    check_on_hosts(hosts, afterwards)


@pytest.mark.parametrize("mode", ADDING, ids=mode_id)
def test_what_the_memory_has_no_room_for_goes_to_servers_from_each_worker(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room_from(4 * LONG[0], monkeypatch)
    pushers = {}

    def begins(key: ClientKey, *arguments: Any, **named: Any) -> None:
        before(key, *arguments, **named)
        pushers[key.info.key] = len(key.pushers)

    before = ClientKey.__init__
    monkeypatch.setattr(ClientKey, "__init__", begins)
    check(mode, ["float32"])
    assert {number for key, number in pushers.items() if "long" in key} == {0}  # all
    assert {number for key, number in pushers.items() if "long" not in key} >= {len(set(mode.hosts[: mode.workers]))}


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

    check_on_hosts(hosts, afterwards)


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
