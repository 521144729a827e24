"""The map of a job: who is what, on which device, with which part of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from mpikv import Config
from mpikv.commands import models
from mpikv.commands.placement_map import Gpus, Line, device, holdings, lines, plans, ranges, table, visible_gpus
from mpikv.server.roles import assign
from mpikv.testing.stores import spawn_stores

NO_GPU = Gpus(0, "")


def of(hosts: Sequence[str], servers: int = 0, model: str = "", gpus: Gpus = NO_GPU, **settings: object) -> list[Line]:
    config = Config(**settings)
    return lines(hosts, [gpus] * len(hosts), assign(hosts, servers, config.server_placement), config, model)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "expected"),
    [
        (NO_GPU, 3, "cpu"),
        (Gpus(0, "0,1"), 0, "cpu"),  # named, but the driver shows none
        (Gpus(4, ""), 3, "gpu:3"),
        (Gpus(4, ""), 5, "gpu:1"),  # more ranks than devices share them
        (Gpus(2, "6, 3"), 1, "gpu:1 (visible: 3)"),
        (Gpus(4, "", 2), 1, "gpu:2"),  # MPIKV_LOCAL_DEVICE
        (Gpus(2, "", 2), 1, "gpu:2 is missing"),
        (Gpus(1, "GPU-5a1b"), 7, "gpu:0 (visible: GPU-5a1b)"),  # the scheduler gave each rank its own
    ],
)
def test_device(gpus: Gpus, local_rank: int, expected: str) -> None:
    assert device(gpus, local_rank) == expected


def test_devices_are_counted_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(_name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == Gpus(0, "1")


def test_without_servers() -> None:
    assert of("aab") == [
        Line(0, "a", "worker", 0, 0, "cpu", "1/3 of the values"),
        Line(1, "a", "worker", 1, 1, "cpu", "1/3 of the values"),
        Line(2, "b", "worker", 2, 0, "cpu", "1/3 of the values"),
    ]
    assert of("a")[0].held == "all values"


def test_with_servers_on_cyclic_ranks() -> None:
    found = of("ababab", 2, gpus=Gpus(2, ""))
    assert [(one.host, one.role, one.number, one.local_rank) for one in found] == [
        ("a", "worker", 0, 0),
        ("b", "worker", 1, 0),
        ("a", "worker", 2, 1),
        ("b", "worker", 3, 1),
        ("a", "server", 0, 2),
        ("b", "server", 1, 2),
    ]
    assert [one.device for one in found] == ["gpu:0", "gpu:0", "gpu:1", "gpu:1", "cpu", "cpu"]
    assert [one.held for one in found] == ["none"] * 4 + ["1/2 of the values"] * 2


@pytest.mark.grid
@pytest.mark.parametrize("servers", [0, 1, 2, 3])
@pytest.mark.parametrize("hosts", ["aaaaa", "aabbc", "abcab", "abcdefgh"])
@pytest.mark.parametrize("algorithm", ["auto", "halving_doubling", "hierarchical"])
def test_every_value_has_one_owner(servers: int, hosts: str, algorithm: str) -> None:
    config = Config(algorithm=algorithm)
    roles = assign(hosts, servers)
    keys = plans("resnet18", roles, hosts, config)
    for n_elems, plan in keys:
        ends = [0, *(shard.end for shard in plan)]
        assert [shard.begin for shard in plan] == ends[:-1]
        assert ends[-1] == n_elems
    held = holdings(keys, len(hosts))
    assert sum(one.n_bytes for one in held) == 4 * models.values("resnet18")
    assert sum(one.whole for one in held) + sum(len(plan) > 1 for _, plan in keys) == len(keys)


@pytest.mark.parametrize("hosts", [["a"] * 3, ["a"] * 5, ["a", "b", "b"], ["a", "b", "c", "d"]])
@pytest.mark.parametrize(("servers", "take"), [(0, "auto"), (1, "auto"), (1, "0.3")])
def test_the_store_holds_what_the_map_says(hosts: list[str], servers: int, take: str) -> None:
    """Against real stores: the owners' shards are those of the map."""
    config = Config(num_servers=servers, servers_take=take, link="200mbit,100us", timeout_s=20)
    shapes = models.shapes("lenet")

    def body(store) -> list[tuple[tuple[int, int, int], ...]]:
        store.init(list(range(len(shapes))), [np.zeros(shape, np.float32) for shape in shapes])
        members, strategy = store.session.members, store.strategy
        of_workers = getattr(strategy, "ring", strategy if not servers else None)
        of_servers = getattr(strategy, "servers", strategy if servers else None)
        queues, keys = getattr(of_workers, "_queues", {}), getattr(of_servers, "_keys", {})
        found = []
        for key in range(len(shapes)):
            bounds = queues[key].bounds if key in queues else ()
            shards = [(members.workers[i], b, e) for i, (b, e) in enumerate(pairwise(bounds)) if b < e]
            placed = keys[key].placement.shards if key in keys else ()
            found.append((*shards, *((members.servers[i], b, e) for i, b, e in placed)))
        return found

    found = spawn_stores("dist_sync", len(hosts) - servers, body, num_servers=servers, config=config, hosts=hosts)
    keys = plans("lenet", assign(hosts, servers), hosts, config)
    assert all(of_worker == [plan for _, plan in keys] for of_worker in found)
    assert [plan[-1].end for _, plan in keys] == [n_elems for n_elems, _ in keys]


def test_a_network_is_counted() -> None:
    total = 4 * models.values("resnet50")
    assert of("a", model="resnet50")[0].held == f"161 of 161 keys: {total} bytes (100.0 %)"
    two = of("aaaa", 2, "resnet50")
    assert [one.held for one in two[:2]] == ["none", "none"]
    assert sum(one.held_bytes for one in two) == total
    assert all("parts of 10: " in one.held for one in two[2:])
    whole = of("aaaa", 2, "resnet50", bigarray_bound_elems=10**9)
    assert not any("part" in one.held for one in whole)
    assert "parts of 8 of 8 keys: " in of("ab", model="lenet")[1].held


def test_table_lines_up() -> None:
    text = table(of(["long-name", "b", "b"], 1))
    assert text[0].split("  ")[0] == "rank"
    column = text[0].index("role")
    assert [line[column:].split("  ")[0] for line in text[1:]] == ["worker 0", "worker 1", "server 0"]
    assert len(text) == 4


def test_a_long_map_is_shortened() -> None:
    block = [f"n{host}" for host in range(20) for _ in range(4)]
    found = of(block, 20, gpus=Gpus(3, ""))
    text = table(found)
    assert len(text) == 3
    assert "n0 ... n19 (20 hosts)" in text[1]
    assert "worker 0-59" in text[1]
    assert "gpu by local rank" in text[1]
    assert text[1].endswith("none")
    assert text[2].split("  ")[0] == "3, 7, 11, ..., 79"
    assert "server 0-19" in text[2]
    assert text[2].endswith("1/20 of the values each")
    assert len(table(found, every_rank=True)) == 81
    assert len(table(of(block[:64]))) == 65  # not yet long
    assert "bytes each" in table(of(block, 20, "resnet50"))[2]


def test_unequal_hosts_have_lines_of_their_own() -> None:
    hosts = ["big"] * 40 + ["small"] * 30 + ["small2"] * 30
    text = table(of(hosts))
    assert [line.split()[0] for line in text[1:]] == ["0-39", "40-99"]
    assert len(table(of(hosts, 60, server_placement="hosts"))) == 3
    assert len(table(of(hosts, 1))) == 4


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7"), ([1, 2], "1-2")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
