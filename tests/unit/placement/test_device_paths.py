"""Which way keys in device memory go: settled from what workers told, with a reason for each better way left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.placement.device_paths import Told, advice, choose, describe, settle, stats
from mpikv.placement.members import Members

NONE = Told(why_none="CuPy is not installed")


def gpus(n: int) -> list[Told]:
    return [Told(i, f"GPU-{i}", "a GPU") for i in range(n)]


def members_of(
    hosts: str, servers: int = 0, *, synchronous: bool = True, memory: bool = True, **settings: Any
) -> Members:
    n = len(hosts) - servers
    everybody = tuple(range(len(hosts)))
    return Members(tuple(hosts), everybody[:n], everybody[n:], synchronous, Config(**settings), memory)


# Hosts, settings, outcomes of trials: the path, and the better ones that it is not.
CHOICES: list[tuple[str, dict[str, Any], dict[str, str], str, list[str]]] = [
    ("a", {}, {}, "ipc", []),
    ("aa", {}, {}, "ipc", []),
    ("aa", {}, {"ipc": "no"}, "nccl", ["ipc"]),
    ("aa", {}, {"ipc": "no", "nccl": "no"}, "mpi", ["ipc", "nccl"]),
    ("aa", {}, {"ipc": "no", "mpi": "no", "nccl": "no"}, "staged", ["ipc", "nccl", "mpi"]),
    ("aa", {"shared_memory": "off"}, {}, "nccl", ["ipc"]),
    ("aa", {"algorithm": "ring"}, {"mpi": "no"}, "staged", ["ipc", "nccl", "mpi"]),
    ("aa", {"memory": False}, {"nccl": "no"}, "mpi", ["ipc", "nccl"]),
    ("ab", {}, {}, "nccl", ["ipc"]),
    ("ab", {"algorithm": "ring"}, {}, "mpi", ["ipc", "nccl"]),
    ("aabb", {"device_path": "staged"}, {}, "staged", ["ipc", "nccl", "mpi"]),
    ("aa", {"device_path": "mpi"}, {"mpi": ""}, "mpi", ["ipc", "nccl"]),
    ("aa", {"device_path": "nccl"}, {"nccl": ""}, "nccl", ["ipc"]),
    ("ab", {"algorithm": "nccl"}, {}, "nccl", ["ipc"]),
    ("aa", {"algorithm": "nccl", "device_path": "nccl"}, {}, "nccl", ["ipc"]),
    ("aa", {"device_path": "host"}, {}, "host", ["ipc", "nccl", "mpi", "staged"]),
    ("aa", {"device_path": "ipc"}, {"ipc": ""}, "ipc", []),
    ("aa", {"synchronous": False}, {}, "staged", ["ipc", "nccl", "mpi"]),
    ("a", {"synchronous": False}, {}, "mpi", ["ipc", "nccl"]),
    ("aa", {"synchronous": False, "shared_memory": "off"}, {}, "mpi", ["ipc", "nccl"]),
    ("aaa", {"servers": 1}, {}, "staged", ["ipc", "nccl", "mpi"]),
    ("aaa", {"servers": 1, "memory": False}, {}, "mpi", ["ipc", "nccl"]),
    ("aab", {"servers": 1}, {}, "mpi", ["ipc", "nccl"]),
    ("aabb", {"servers": 2}, {}, "mpi", ["ipc", "nccl"]),
    ("aab", {"servers": 1}, {"mpi": "no"}, "staged", ["ipc", "nccl", "mpi"]),
    ("aab", {"servers": 1, "device_path": "staged"}, {}, "staged", ["ipc", "nccl", "mpi"]),
    ("aab", {"servers": 1, "device_path": "host"}, {}, "host", ["ipc", "nccl", "mpi", "staged"]),
]


@pytest.mark.parametrize(("hosts", "settings", "outcomes", "path", "left"), CHOICES)
def test_the_first_that_can_be_gone(
    hosts: str, settings: dict[str, Any], outcomes: dict[str, str], path: str, left: list[str]
) -> None:
    members = members_of(hosts, **settings)
    choice = choose(gpus(len(members.workers)), members, outcomes)
    assert choice.path == path
    assert [one for one, _ in choice.reasons] == left
    assert all(why for _, why in choice.reasons)
    assert describe(choice).startswith(choice.path)
    found = stats(choice.of(members))
    assert found == {"device_path": path, "device_path_reasons": dict(choice.reasons)}


def test_reasons_are_those_of_the_trials() -> None:
    outcomes = {"ipc": "no ipc here", "mpi": "no mpi here", "nccl": "no nccl here"}
    choice = choose(gpus(2), members_of("aa"), outcomes)
    assert dict(choice.reasons) == outcomes
    assert describe(choice) == "staged (not ipc: no ipc here; not nccl: no nccl here; not mpi: no mpi here)"
    assert describe(choose(gpus(2), members_of("ab"), {})) == "nccl (not ipc: the workers are on 2 hosts)"
    ring = choose(gpus(2), members_of("ab", algorithm="ring"), {})
    assert dict(ring.reasons)["nccl"] == "MPIKV_ALGORITHM=ring asks for another algorithm"


def test_without_a_gpu_keys_are_on_the_host() -> None:
    choice = choose([*gpus(1), NONE], members_of("ab"), {})
    assert choice.path == "host"
    assert set(dict(choice.reasons).values()) == {"worker 1 on b uses no GPU: CuPy is not installed"}


@pytest.mark.parametrize("path", ["ipc", "mpi", "nccl", "staged"], ids=str.upper)
def test_a_path_that_is_asked_for_and_cannot_be_gone(path: str) -> None:
    with pytest.raises(ConfigError, match=f"MPIKV_DEVICE_PATH={path}: worker 1 on b uses no GPU: CuPy is not"):
        choose([*gpus(1), NONE], members_of("ab", device_path=path), {})


@pytest.mark.parametrize("path", ["ipc", "nccl"], ids=str.upper)
def test_ways_between_workers_where_servers_own_the_keys(path: str) -> None:
    with pytest.raises(ConfigError, match=f"MPIKV_DEVICE_PATH={path}: servers own the keys"):
        choose(gpus(1), members_of("ab", servers=1, device_path=path), {})
    with pytest.raises(ConfigError, match="MPIKV_DEVICE_PATH=mpi: servers are reached through the memory of their"):
        choose(gpus(1), members_of("aa", servers=1, device_path="mpi"), {})
    choice = choose(gpus(2), members_of("aaa", servers=1), {})
    assert describe(choice) == (
        "staged (not ipc, nccl: servers own the keys; not mpi: servers are reached through the memory of their host)"
    )
    choice = choose([NONE], members_of("ab", servers=1), {})
    assert describe(choice) == "host (not ipc, nccl, mpi, staged: worker 0 on a uses no GPU: CuPy is not installed)"


def test_trials_that_fail_where_a_path_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="MPIKV_DEVICE_PATH=mpi: not built for it"):
        choose(gpus(2), members_of("ab", device_path="mpi"), {"mpi": "not built for it"})
    with pytest.raises(ConfigError, match="MPIKV_DEVICE_PATH=ipc: the workers are on 2 hosts"):
        choose(gpus(2), members_of("ab", device_path="ipc"), {})
    same = [one._replace(uuid="GPU-0") for one in gpus(2)]
    with pytest.raises(
        ConfigError, match=r"MPIKV_DEVICE_PATH=nccl: NCCL needs .* worker 0 on a and worker 1 on a share"
    ):
        choose(same, members_of("aa", device_path="nccl"), {})
    assert choose(same, members_of("ab", device_path="nccl"), {}).path == "nccl"  # of the same name on two hosts
    with pytest.raises(ConfigError, match="MPIKV_ALGORITHM=nccl: worker 0 on a: CuPy is built without NCCL"):
        choose(gpus(2), members_of("ab", algorithm="nccl"), {"nccl": "worker 0 on a: CuPy is built without NCCL"})
    with pytest.raises(ConfigError, match="MPIKV_ALGORITHM=nccl: worker 1 on b uses no GPU: CuPy is not installed"):
        choose([*gpus(1), NONE], members_of("ab", algorithm="nccl"), {})
    with pytest.raises(ConfigError, match="MPIKV_ALGORITHM=nccl: servers own the keys"):
        choose(gpus(1), members_of("ab", servers=1, algorithm="nccl"), {})
    # By default it is a reason.
    choice = choose([*gpus(2), gpus(2)[1]], members_of("abb"), {})
    assert choice.path == "mpi"
    assert dict(choice.reasons)["nccl"].endswith("worker 1 on b and worker 2 on b share one")


@pytest.mark.parametrize("path", ["ipc", "mpi", "staged", "host"], ids=str.upper)
def test_settings_that_ask_for_two_ways(path: str) -> None:
    with pytest.raises(ConfigError, match=f"MPIKV_ALGORITHM=nccl, but MPIKV_DEVICE_PATH={path}: give one of the two"):
        choose(gpus(2), members_of("ab", algorithm="nccl", device_path=path), {})


def test_what_one_worker_cannot_do_all_are_told() -> None:
    told = [*gpus(1), Told(error="MPIKV_LOCAL_DEVICE=7, but this process sees one GPU")]
    with pytest.raises(ConfigError, match="worker 1 on b: MPIKV_LOCAL_DEVICE=7, but"):
        choose(told, members_of("ab"), {})


@pytest.mark.parametrize(
    ("hosts", "answers", "path", "tried"),
    [
        ("aa", {"ipc": "", "mpi": ""}, "ipc", ["ipc"]),
        ("aa", {"ipc": "x", "mpi": "", "nccl": ""}, "nccl", ["ipc", "nccl"]),
        ("aa", {"ipc": "x", "mpi": "y", "nccl": "z"}, "staged", ["ipc", "nccl", "mpi"]),
        ("ab", {"ipc": "", "mpi": "", "nccl": ""}, "nccl", ["nccl"]),
        ("ab", {"ipc": "", "mpi": "", "nccl": "z"}, "mpi", ["nccl", "mpi"]),
    ],
)
def test_only_what_may_be_taken_is_tried(hosts: str, answers: dict[str, str], path: str, tried: list[str]) -> None:
    found: list[str] = []

    def trial(name: str) -> Any:
        return lambda: (found.append(name), answers[name])[1]

    choice = settle(gpus(2), members_of(hosts), {name: trial(name) for name in answers})
    assert choice.path == path
    assert found == tried


def test_advice_only_where_values_pass_through_the_host_to_another() -> None:
    def told(hosts: str, path: Any = "staged", **settings: Any) -> str:
        members = members_of(hosts, **settings)
        return advice(replace(members, device_path=path, device_reasons=(("mpi", "not built for it"),)))

    assert "not built for it" in told("ab")
    assert "docs/gpu.md" in told("ab")
    assert not told("aa")
    assert not told("ab", device_path="staged")
    assert not told("ab", "mpi")
    assert "docs/gpu.md" in told("ab", servers=1)
    assert not told("aa", servers=1)
