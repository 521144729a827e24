"""Every path that a gradient can go, on thread ranks, through the checks of mpikv.testing.paths; every mode through
those of tests/store_checks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grids
import numpy as np
import pytest
from on_workers import on
from store_checks import every_check
from store_modes import (
    ADDING,
    ASYNC,
    FEW,
    FEW_ASYNC,
    FEW_ON_DEVICE,
    HYBRID,
    LOCAL,
    ONE_HOST,
    SYNC,
    THREE_HOSTS,
    TWO_HOSTS,
    Mode,
    mode_id,
)

from mpikv import KVStore
from mpikv.strategies.client_key import ClientKey
from mpikv.strategies.host_keys import HostKeys
from mpikv.testing.paths import DTYPES, LONG, check_path

F32 = np.float32
HOSTS = [Mode("dist_sync", len(h), hosts=h, memory=m) for h in ("aab", "abab", "aabbc") for m in ("auto", "off")]
EVERY = (*SYNC, *ASYNC, *FEW_ON_DEVICE, *HOSTS, THREE_HOSTS, Mode("dist_sync", 3, codec="reversed"))


def check(mode: Mode, dtypes: Any, path: str | None = None, **changes: Any) -> None:
    check_path(
        lambda body: mode.run(body, **changes), mode.workers, dtypes=dtypes, synchronous=mode.synchronous, path=path
    )


# The path that all keys of float32 must go there.
PATHS = {mode: mode.device for mode in FEW_ON_DEVICE if not mode.servers}
PATHS |= {Mode("dist_sync", 3): "direct", Mode("dist_sync", 3, 0, "ring"): "ring", TWO_HOSTS: "hosted"}


@pytest.mark.parametrize(
    ("i", "mode"),
    [
        pytest.param(i, mode, marks=[] if i % 3 == 0 or mode in PATHS else pytest.mark.thorough)
        for i, mode in enumerate(EVERY)
    ],
    ids=lambda one: mode_id(one) if isinstance(one, Mode) else "",
)
def test_every_mode(i: int, mode: Mode) -> None:
    """Every third mode with one dtype; in a thorough run each with two, of which neighbours have others."""
    step = 4 if grids.is_thorough() else 8
    check(mode, ["float32"] if mode in PATHS else DTYPES[i % step :: step], PATHS.get(mode))


@on(Mode("dist_sync", 3, 2, memory="long"), Mode("dist_async", 2), Mode("dist_async", 3, 2, memory="off"))
@pytest.mark.parametrize("bound_elems", [8, 10**9], ids=["cut", "whole"])
def test_values_in_partitions(mode: Mode, bound_elems: int) -> None:
    check(mode, ["float32"], partition_bytes=1000, bigarray_bound_elems=bound_elems)


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        *(
            (mode, {"progress": "calls"})
            for mode in (Mode("dist_sync", 3), Mode("dist_sync", 2, 2), Mode("dist_async", 2))
        ),
        *(
            (mode, {})
            for mode in (Mode("dist_sync_device", 2), Mode("dist_device_sync", 2, 1), Mode("dist", 2), *LOCAL)
        ),
    ],
    ids=str,
)
def test_without_a_progress_thread_and_other_names(mode: Mode, changes: dict[str, Any]) -> None:
    check(mode, ["float32"], **changes)


# --- keys of one store that go different ways

LAYOUTS = pytest.mark.parametrize("hosts", ["aaa", "abab"])


def paths_of(store: KVStore) -> dict[Any, str]:
    return {queue.info.key: queue.placement.path for queue in store.strategy.ring.all()}


def check_on_hosts(hosts: str, afterwards: Callable[[KVStore], None]) -> None:
    def run(body: Callable[[KVStore], Any]) -> Any:
        def checked(store: KVStore) -> Any:
            found = body(store)
            afterwards(store)
            return found

        return Mode("dist_sync", len(hosts), hosts=hosts).run(checked)

    check_path(run, len(hosts), dtypes=["float32"])


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

    def afterwards(store: KVStore) -> None:
        paths = paths_of(store)
        assert paths.pop("long") == "ring"
        assert set(paths.values()) == {"direct" if hosts == "aaa" else "hosted"}
        assert 0 < store.stats()["shared_bytes"] < 4 * LONG[0]

    check_on_hosts(hosts, afterwards)


@pytest.mark.parametrize("mode", ADDING[::2], ids=mode_id)
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


# --- every mode


OF_MATRICES = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")


@OF_MATRICES
@on(
    ONE_HOST, THREE_HOSTS, *FEW[::2], FEW[-1], *(pytest.param(mode, marks=pytest.mark.thorough) for mode in FEW[1:-1:2])
)
def test_every_check(store, mode):
    every_check(store, mode)


@OF_MATRICES
@on(TWO_HOSTS, HYBRID[0], FEW_ASYNC[0], late=True, progress="calls")
def test_messages_that_come_late_to_a_store_without_a_thread(store, mode):
    every_check(store, mode)
