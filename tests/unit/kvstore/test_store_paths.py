"""Every path that a gradient can go, on thread ranks, through the checks of mpikv.testing.paths."""

from __future__ import annotations

from typing import Any

import pytest
from store_modes import ASYNC, FEW_ON_DEVICE, LOCAL, SYNC, Mode, every_way, mode_id

from mpikv.config import Config
from mpikv.testing.paths import DTYPES, check_path
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
    "mode",
    [Mode("dist_sync_device", 2), Mode("dist_device_sync", 2, 1), Mode("dist", 2), *LOCAL],
    ids=mode_id,
)
def test_other_names_of_the_synchronous_store(mode: Mode) -> None:
    check(mode, ["float32"])
