"""Placements, one by one: these values are what stores in use compute, and ranks of different versions would mix up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpikv.arrays.as_numpy import dtype_of
from mpikv.codecs.compression import wire_of
from mpikv.config import Config
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.owners import CUT_BYTES, add_load, as_announced, place_at_owners
from mpikv.placement.place import place, place_rows

WHOLE = {"whole": True}
OFF = {"shared_memory": "off"}


def key(number: int, n_elems: int, dtype: str) -> KeyInfo:
    return KeyInfo(number, number, (n_elems,), dtype_of(dtype))


# Hosts of the workers, elements, dtype, settings: path, elements of each worker.
AMONG_WORKERS: list[tuple[str, int, str, dict[str, Any], tuple[str, tuple[int, ...]]]] = [
    ("a", 2000003, "float32", {}, ("ring", (2000003,))),
    ("aa", 0, "float32", {}, ("direct", (0, 0))),
    ("aa", 2000003, "float32", {}, ("direct", (1000002, 1000001))),
    ("ab", 1, "float32", {}, ("ring", (1, 0))),
    ("aabb", 10, "float64", {}, ("hosted", (3, 2, 3, 2))),
    ("aab", 13, "float16", {}, ("hosted", (4, 3, 6))),
    ("aaabbc", 10, "float64", {}, ("hosted", (2, 1, 1, 2, 1, 3))),
    ("aaa", 7, "float32", OFF, ("ring", (3, 2, 2))),
    ("aabb", 10, "float64", {"fits": False}, ("ring", (3, 3, 2, 2))),  # no room in the memory
    ("abcde", 11, "int8", {"algorithm": "native"}, ("native", (3, 2, 2, 2, 2))),
    ("aabbb", 11, "int8", {"algorithm": "native", "number": 9, **WHOLE}, ("native", (0, 0, 0, 0, 11))),
    ("aaa", 11, "int8", {"algorithm": "ring", "number": 9, **WHOLE}, ("ring", (11, 0, 0))),
    ("aaa", 40000, "float32", {"number": 1, **WHOLE}, ("direct", (0, 40000, 0))),
    ("aabb", 40000, "float32", {"number": 6, **WHOLE}, ("hosted", (0, 0, 40000, 0))),
    ("aabb", 40000, "float32", {"end": 10}, ("divided", (3, 2, 3, 2))),  # servers have the rest
]

# Elements, itemsize, bytes held by each server, bound, partition bytes, whole: shards, elements of a partition.
ON_SERVERS: list[tuple[int, int, list[int], int, int, bool, list[tuple[int, int, int]], int]] = [
    (9, 4, [7, 0, 5], 10, 1048576, False, [(1, 0, 9)], 262144),
    (10, 4, [7, 0, 5], 10, 12, False, [(0, 0, 4), (1, 4, 7), (2, 7, 10)], 3),
    (10, 4, [7, 0, 5], 10, 12, True, [(1, 0, 10)], 3),
    (0, 4, [7, 0], 1, 1048576, False, [], 262144),
    (2, 4, [7, 0, 5], 1, 3, False, [(0, 0, 1), (1, 1, 2)], 1),
    (1_000_003, 2, [1, 0], 1_000_000, 1048576, False, [(0, 0, 500_002), (1, 500_002, 1_000_003)], 524288),
    # Not in more than 64 pieces, or in pieces of 64 KiB.
    (64, 4, [0], 1_000_000, 1, False, [(0, 0, 64)], 1),
    (180_000, 4, [0], 1_000_000, 16, False, [(0, 0, 180_000)], 2813),
    (180_000, 4, [0], 1_000_000, 12_000, False, [(0, 0, 180_000)], 3000),
    (2**30, 4, [0, 0], 1_000_000, 65544, False, [(0, 0, 2**29), (1, 2**29, 2**30)], 16386),
]


def members_of(hosts: str, settings: dict[str, Any], **fields: Any) -> Members:
    config = Config(**{name: settings[name] for name in ("algorithm", "shared_memory") if name in settings})
    return Members(tuple(hosts), tuple(range(len(hosts))), config=config, **fields)


def options_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in ("whole", "fits", "end", "updated") if name in settings}


@pytest.mark.parametrize(("hosts", "n", "dtype", "settings", "expected"), AMONG_WORKERS)
def test_among_workers(
    hosts: str, n: int, dtype: str, settings: dict[str, Any], expected: tuple[str, tuple[int, ...]]
) -> None:
    found = place(members_of(hosts, settings), key(settings.get("number", 0), n, dtype), **options_of(settings))
    assert (found.path, tuple(np.diff(found.bounds).tolist())) == expected
    assert found.owners == tuple(range(len(hosts)))


# Hosts of the workers, device path, elements, settings: path, elements of each worker, path on the host.
ON_DEVICES: list[tuple[str, Any, int, dict[str, Any], tuple[str, tuple[int, ...], str | None]]] = [
    ("a", "host", 13, {}, ("ring", (13,), None)),
    ("aaaaa", "mpi", 2000003, {"number": 6, **WHOLE}, ("mpi", (0, 2000003, 0, 0, 0), None)),
    ("aab", "mpi", 9000, {}, ("mpi", (3008, 3008, 2984), None)),
    ("aaa", "nccl", 10, {"updated": True}, ("nccl", (10, 0, 0), None)),
    ("aaa", "host", 10, {}, ("host", (4, 3, 3), "direct")),
    ("aab", "host", 9000, {}, ("host", (2250, 2250, 4500), "hosted")),
    ("aab", "host", 9000, {"fits": False}, ("host", (3000, 3000, 3000), "ring")),
    ("abc", "host", 10, {"algorithm": "native"}, ("host", (4, 3, 3), "native")),
]


@pytest.mark.parametrize(("hosts", "device_path", "n", "settings", "expected"), ON_DEVICES)
def test_on_devices(
    hosts: str, device_path: Any, n: int, settings: dict[str, Any], expected: tuple[str, tuple[int, ...], str | None]
) -> None:
    members, options = members_of(hosts, settings, device_path=device_path), options_of(settings)
    info = key(settings.get("number", 0), n, "float32")
    found = place(members, info._replace(space="device"), **options)
    assert (found.path, tuple(np.diff(found.bounds).tolist()), found.host) == expected
    on_host = place(members, info, **options)  # keys in host memory go as they always did
    assert on_host == place(members_of(hosts, settings), info, **options)
    if found.path == "host":
        assert found == on_host._replace(path="host", host=on_host.path)
    elif not options.get("whole"):
        assert all(bound * info.dtype.itemsize % 128 == 0 or bound == info.n_elems for bound in found.bounds)


@pytest.mark.parametrize(
    ("dtype", "updated", "all_of_it"), [("f4", False, True), ("f4", True, False), ("f2", False, False)]
)
def test_what_nccl_adds_at_once_every_worker_owns(dtype: str, updated: bool, all_of_it: bool) -> None:
    found = place(members_of("aab", {}, device_path="nccl"), key(0, 9, dtype)._replace(space="device"), updated=updated)
    assert found.replicated is all_of_it


@pytest.mark.parametrize("row", ON_SERVERS)
def test_on_servers(row: tuple[int, int, list[int], int, int, bool, list[tuple[int, int, int]], int]) -> None:
    n, itemsize, held, bound, partition, whole, shards, partition_elems = row
    config = Config(bigarray_bound_elems=bound, partition_bytes=partition)
    members = Members(("a",) * (1 + len(held)), (0,), tuple(range(1, 1 + len(held))), config=config)
    info = key(3, n, {2: "float16", 4: "float32", 8: "float64"}[itemsize])
    found = place_at_owners(members, info, wire_of(info), whole=whole, load_bytes=held)
    assert (found.path, list(found.shards), found.partition_elems) == ("owners", shards, partition_elems)
    assert as_announced(members, info, found.announced(), wire_of(info)) == found


CUT = CUT_BYTES // 4
# Hosts of workers that own the key, elements, codec, other options: elements of each owner.
IN_WORKERS: list[tuple[str, int, str, dict[str, Any], tuple[int, ...]]] = [
    ("abc", CUT - 1, "none", {"number": 7}, (0, CUT - 1, 0)),  # dealt out
    ("abc", CUT - 1, "none", {"load_bytes": [5, 4, 3]}, (0, 0, CUT - 1)),
    ("abc", CUT, "none", {}, (1366, 1365, 1365)),
    ("abc", CUT, "none", {"number": 5, "updated": True, **WHOLE}, (0, 0, CUT)),
    ("ab", 10, "none", {}, (10, 0)),  # also where each would send the other as many bytes
    ("abcde", 10, '{"type": "2bit"}', {}, (10,) * 5),
    ("abcde", 5 * CUT, '{"type": "2bit"}', {"updated": True}, (CUT,) * 5),
    ("abc", 3 * CUT, '{"type": "none", "pull": "bf16"}', {}, (CUT,) * 3),  # an owner has the exact sum
    ("abc", 3 * CUT, '{"type": "int8", "block": 2048}', {"updated": True}, (4096, 4096, 4096)),  # whole blocks
]


@pytest.mark.parametrize(("hosts", "n", "codec", "options", "expected"), IN_WORKERS)
def test_at_workers(hosts: str, n: int, codec: str, options: dict[str, Any], expected: tuple[int, ...]) -> None:
    members, info = members_of(hosts, {}), key(options.get("number", 0), n, "float32")._replace(codec=codec)
    more = {name: value for name, value in options.items() if name != "number"}
    found = place_at_owners(members, info, wire_of(info), **more)
    elems = [0] * len(hosts)
    for owner, begin, end in found.shards:
        elems[owner] += end - begin
    assert (found.path, tuple(elems)) == ("owners", expected)
    assert found.replicated is (sum(expected) > n)
    assert as_announced(members, info, found.announced(), wire_of(info)) == found


def test_an_asynchronous_store_without_servers_has_one_in_every_worker() -> None:
    assert Members(("a", "b", "b"), (0, 1, 2), (), synchronous=False).owners == (0, 1, 2)


@pytest.mark.parametrize(
    ("workers", "servers", "owners", "pairs"),
    [
        (1, 0, (0,), [(0,)]),
        (3, 0, (0, 1, 2), [(0, 1), (1, 2), (2, 0)]),
        (3, 1, (3, 0), [(0, 1)]),  # an only server, and the first worker for its death
        (2, 3, (2, 3, 4), [(0, 1), (1, 2), (2, 0)]),
    ],
)
def test_where_an_owner_may_die_each_key_has_a_second_one(
    workers: int, servers: int, owners: tuple[int, ...], pairs: list[tuple[int, ...]]
) -> None:
    config, ranks = Config(on_failure="continue", bigarray_bound_elems=8), range(workers + servers)
    members = Members(("a",) * len(ranks), (*ranks[:workers],), (*ranks[workers:],), synchronous=False, config=config)
    assert members.owners == owners
    loads = [0] * len(owners)
    for number in range(2 * len(pairs)):
        info = key(number, 100, "float32")
        found = place_at_owners(members, info, wire_of(info), load_bytes=loads)
        add_load(loads, found, 4)
        assert found.owners in pairs, "also a long key is not cut"
        assert {(shard.begin, shard.end) for shard in found.shards} == {(0, 100)}
        assert as_announced(members, info, found.announced(), wire_of(info)) == found
        shards = place_rows(members, info._replace(sparse=True))
        assert [(shard.begin, shard.end) for shard in shards] == [(0, info.shape[0])] * len(pairs[0])
        assert tuple(shard.owner for shard in shards) in pairs
    held = {owner for found in pairs for owner in found}
    assert {owner for owner, n_bytes in enumerate(loads) if n_bytes} == held
