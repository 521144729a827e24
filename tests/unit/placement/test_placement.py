"""Placements, one by one: these values are what stores in use compute, and ranks of different versions would mix up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpikv.arrays.as_numpy import dtype_of
from mpikv.config import Config
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.on_servers import as_announced
from mpikv.placement.place import place

WHOLE = {"whole": True}
OFF = {"shared_memory": "off"}


def key(number: int, n_elems: int, dtype: str) -> KeyInfo:
    return KeyInfo(number, number, (n_elems,), dtype_of(dtype))


# Hosts of the workers, elements, dtype, settings: path, algorithm, elements of each worker.
AMONG_WORKERS: list[tuple[str, int, str, dict[str, Any], tuple[str, str, tuple[int, ...]]]] = [
    ("a", 0, "float32", {}, ("messages", "naive", (0,))),
    ("a", 2000003, "float32", {}, ("messages", "ring", (2000003,))),
    ("aa", 0, "float32", {}, ("direct", "naive", (0, 0))),
    ("aa", 2000003, "float32", {}, ("direct", "naive", (1000002, 1000001))),
    ("aaaaa", 13, "float16", {}, ("direct", "naive", (3, 3, 3, 2, 2))),
    ("ab", 1, "float32", {}, ("messages", "naive", (1, 0))),
    ("ab", 9000, "float32", {}, ("messages", "ring", (4500, 4500))),
    ("abc", 10, "float64", {}, ("messages", "naive", (4, 3, 3))),
    ("abcde", 13, "float16", {}, ("messages", "halving_doubling", (4, 3, 3, 3, 0))),
    ("abcde", 9000, "float32", {}, ("messages", "ring", (1800, 1800, 1800, 1800, 1800))),
    ("aabb", 1, "float32", {}, ("hosted", "hierarchical", (1, 0, 0, 0))),
    ("aabb", 10, "float64", {}, ("hosted", "hierarchical", (3, 2, 3, 2))),
    ("abab", 10, "float64", {}, ("hosted", "hierarchical", (3, 3, 2, 2))),
    ("aab", 13, "float16", {}, ("hosted", "hierarchical", (4, 3, 6))),
    ("aaabbc", 10, "float64", {}, ("hosted", "hierarchical", (2, 1, 1, 2, 1, 3))),
    ("aaa", 7, "float32", OFF, ("messages", "naive", (3, 2, 2))),
    ("aaaaa", 7, "float32", OFF, ("messages", "halving_doubling", (2, 2, 2, 1, 0))),
    ("aaaaa", 70000, "bfloat16", OFF, ("messages", "ring", (14000, 14000, 14000, 14000, 14000))),
    ("aab", 70000, "bfloat16", OFF, ("messages", "hierarchical", (17500, 17500, 35000))),
    ("aabbb", 11, "int8", {"algorithm": "naive"}, ("messages", "naive", (3, 2, 2, 2, 2))),
    ("abcde", 11, "int8", {"algorithm": "native"}, ("native", "native", (3, 2, 2, 2, 2))),
    ("aabbb", 11, "int8", {"algorithm": "native", "number": 9, **WHOLE}, ("native", "native", (0, 0, 0, 0, 11))),
    ("aabbb", 11, "int8", {"algorithm": "ring"}, ("messages", "ring", (3, 2, 2, 2, 2))),
    ("aaa", 11, "int8", {"algorithm": "ring", "number": 9, **WHOLE}, ("messages", "ring", (11, 0, 0))),
    ("abcde", 11, "int8", {"algorithm": "halving_doubling"}, ("messages", "halving_doubling", (3, 3, 3, 2, 0))),
    (
        *("aabbb", 11, "int8", {"algorithm": "halving_doubling", "number": 9, **WHOLE}),
        ("messages", "halving_doubling", (0, 11, 0, 0, 0)),
    ),
    ("abcde", 11, "int8", {"algorithm": "hierarchical"}, ("messages", "hierarchical", (3, 2, 2, 2, 2))),
    ("aabbb", 11, "int8", {"algorithm": "hierarchical"}, ("messages", "hierarchical", (3, 3, 2, 2, 1))),
    ("aaa", 40000, "float32", {"number": 1, **WHOLE}, ("direct", "naive", (0, 40000, 0))),
    ("aabb", 40000, "float32", {"number": 6, **WHOLE}, ("hosted", "hierarchical", (0, 0, 40000, 0))),
    ("abcde", 40000, "float32", {"number": 6, **WHOLE}, ("messages", "ring", (0, 40000, 0, 0, 0))),
]

# Elements, itemsize, bytes held by each server, bound, partition bytes, whole: shards, elements of a partition.
ON_SERVERS: list[tuple[int, int, list[int], int, int, bool, list[tuple[int, int, int]], int]] = [
    (5, 4, [0], 10, 8, False, [(0, 0, 5)], 2),
    (9, 4, [7, 0, 5], 10, 1048576, False, [(1, 0, 9)], 262144),
    (10, 4, [7, 0, 5], 10, 12, False, [(0, 0, 4), (1, 4, 7), (2, 7, 10)], 3),
    (10, 4, [7, 0, 5], 10, 12, True, [(1, 0, 10)], 3),
    (0, 4, [7, 0], 1, 1048576, False, [], 262144),
    (2, 4, [7, 0, 5], 1, 3, False, [(0, 0, 1), (1, 1, 2)], 1),
    (1_000_003, 2, [1, 0], 1_000_000, 1048576, False, [(0, 0, 500_002), (1, 500_002, 1_000_003)], 524288),
    # Not in more than 64 pieces, or in pieces of 64 KiB.
    (64, 4, [0], 1_000_000, 1, False, [(0, 0, 64)], 1),
    (65, 4, [0], 1_000_000, 4, False, [(0, 0, 65)], 2),
    (180_000, 4, [0], 1_000_000, 16, False, [(0, 0, 180_000)], 2813),
    (180_000, 4, [0], 1_000_000, 12_000, False, [(0, 0, 180_000)], 3000),
    (2**30, 4, [0, 0], 1_000_000, 16, False, [(0, 0, 2**29), (1, 2**29, 2**30)], 15360),
    (2**30, 4, [0, 0], 1_000_000, 65544, False, [(0, 0, 2**29), (1, 2**29, 2**30)], 16386),
]


def members_of(hosts: str, settings: dict[str, Any], **fields: Any) -> Members:
    config = Config(**{name: settings[name] for name in ("algorithm", "shared_memory") if name in settings})
    return Members(tuple(hosts), tuple(range(len(hosts))), config=config, **fields)


@pytest.mark.parametrize(("hosts", "n", "dtype", "settings", "expected"), AMONG_WORKERS)
def test_among_workers(
    hosts: str, n: int, dtype: str, settings: dict[str, Any], expected: tuple[str, str, tuple[int, ...]]
) -> None:
    members = members_of(hosts, settings)
    found = place(members, key(settings.get("number", 0), n, dtype), whole=settings.get("whole", False))
    assert (found.path, found.algorithm, tuple(np.diff(found.bounds).tolist())) == expected
    assert found.owners == tuple(range(len(hosts)))


# Hosts of the workers, device path, elements, settings: path, algorithm, elements of each worker, path on the host.
ON_DEVICES: list[tuple[str, Any, int, dict[str, Any], tuple[str, str, tuple[int, ...], str | None]]] = [
    ("a", "host", 13, {}, ("messages", "naive", (13,), None)),
    ("aaaaa", "mpi", 2000003, {"number": 6, **WHOLE}, ("mpi", "naive", (0, 2000003, 0, 0, 0), None)),
    ("aaa", "mpi", 10, {}, ("mpi", "naive", (10, 0, 0), None)),
    ("abc", "mpi", 9000, {}, ("mpi", "ring", (3008, 3008, 2984), None)),
    ("aab", "mpi", 9000, {}, ("mpi", "ring", (3008, 3008, 2984), None)),
    ("abc", "mpi", 9000, {"algorithm": "native"}, ("mpi", "ring", (3008, 3008, 2984), None)),
    ("aaa", "nccl", 10, {}, ("nccl", "nccl_allreduce", (10, 0, 0), None)),
    ("aaa", "host", 10, {}, ("host", "naive", (4, 3, 3), "direct")),
    ("aab", "host", 9000, {}, ("host", "hierarchical", (2250, 2250, 4500), "hosted")),
    ("abc", "host", 9000, {}, ("host", "ring", (3000, 3000, 3000), "messages")),
    ("aaa", "host", 7, OFF, ("host", "naive", (3, 2, 2), "messages")),
    ("abc", "host", 10, {"algorithm": "native"}, ("host", "native", (4, 3, 3), "native")),
]


@pytest.mark.parametrize(("hosts", "device_path", "n", "settings", "expected"), ON_DEVICES)
def test_on_devices(
    hosts: str,
    device_path: Any,
    n: int,
    settings: dict[str, Any],
    expected: tuple[str, str, tuple[int, ...], str | None],
) -> None:
    members = members_of(hosts, settings, device_path=device_path)
    info = key(settings.get("number", 0), n, "float32")
    whole = settings.get("whole", False)
    found = place(members, info._replace(space="device"), whole=whole)
    assert (found.path, found.algorithm, tuple(np.diff(found.bounds).tolist()), found.host) == expected
    on_host = place(members, info, whole=whole)  # keys in host memory go as they always did
    assert on_host == place(members_of(hosts, settings), info, whole=whole)
    if found.path == "host":
        assert found == on_host._replace(path="host", host=on_host.path)
    elif not whole and found.algorithm != "hierarchical":
        assert all(bound * info.dtype.itemsize % 128 == 0 or bound == info.n_elems for bound in found.bounds)


def test_a_copied_key_that_shared_memory_has_no_room_for() -> None:
    members = Members(("a", "a", "b"), (0, 1, 2), device_path="host")
    found = place(members, key(0, 10, "float32")._replace(space="device"), fits=False)
    assert (found.path, found.host) == ("host", "messages")


@pytest.mark.parametrize("row", ON_SERVERS)
def test_on_servers(row: tuple[int, int, list[int], int, int, bool, list[tuple[int, int, int]], int]) -> None:
    n, itemsize, held, bound, partition, whole, shards, partition_elems = row
    config = Config(bigarray_bound_elems=bound, partition_bytes=partition)
    members = Members(("a",) * (1 + len(held)), (0,), tuple(range(1, 1 + len(held))), config=config)
    info = key(3, n, {2: "float16", 4: "float32", 8: "float64"}[itemsize])
    found = place(members, info, whole=whole, load_bytes=held)
    assert (found.path, found.algorithm, list(found.shards), found.partition_elems) == (
        "servers",
        "",
        shards,
        partition_elems,
    )
    assert as_announced(members, info, found.announced()) == found


def test_an_asynchronous_store_without_servers_has_one_in_every_worker() -> None:
    members = Members(("a", "b", "b"), (0, 1, 2), (), synchronous=False)
    assert members.owners == (0, 1, 2)
    assert place(members, key(0, 10, "float32"), load_bytes=[4, 0, 8]).shards == ((1, 0, 10),)


def test_a_key_without_room_in_the_memory_takes_messages() -> None:
    """And adds in the same order as one that has room."""
    for hosts in ("aa", "aabb"):
        members, info = Members(tuple(hosts), tuple(range(len(hosts)))), key(0, 100_000, "float32")
        found = place(members, info)
        assert place(members, info, fits=False) == found._replace(path="messages")
