"""Which path keys in device memory go: settled from what workers say, with a reason for each better path left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.placement.device_paths import DeviceReport, advice, choose, describe, settle, stats
from mpikv.placement.members import Members

NONE = DeviceReport(why_none="CuPy is not installed")


def gpus(n: int) -> list[DeviceReport]:
    return [DeviceReport(i, f"GPU-{i}", "a GPU") for i in range(n)]


def members_of(
    hosts: str, servers: int = 0, *, synchronous: bool = True, memory: bool = True, **settings: Any
) -> Members:
    n = len(hosts) - servers
    everybody = tuple(range(len(hosts)))
    return Members(tuple(hosts), everybody[:n], everybody[n:], synchronous, Config(**settings), memory)


# Hosts, settings, outcomes of trials: the path, and the better ones that it is not.
CHOICES: list[tuple[str, dict[str, Any], dict[str, str], str, list[str]]] = [
    ("aa", {}, {}, "nccl", []),
    ("aa", {}, {"nccl": "no"}, "mpi", ["nccl"]),
    ("aa", {}, {"mpi": "no", "nccl": "no"}, "host", ["nccl", "mpi"]),
    ("aa", {"algorithm": "ring"}, {"mpi": "no"}, "host", ["nccl", "mpi"]),
    ("ab", {"algorithm": "ring"}, {}, "mpi", ["nccl"]),
    ("a", {}, {}, "host", ["nccl", "mpi"]),
    ("a", {"device_path": "nccl"}, {}, "nccl", []),
    ("aa", {"device_path": "mpi"}, {"mpi": ""}, "mpi", ["nccl"]),
    ("ab", {"algorithm": "nccl"}, {}, "nccl", []),
    ("aa", {"synchronous": False}, {}, "host", ["nccl", "mpi"]),
    ("a", {"synchronous": False}, {}, "host", ["nccl", "mpi"]),
    ("aab", {"servers": 1}, {}, "host", ["nccl", "mpi"]),
]
SAME = [one._replace(uuid="GPU-0") for one in gpus(2)]
WITHOUT, NO_GPU = [*gpus(1), NONE], "worker 1 on b uses no GPU: CuPy is not installed"


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
    outcomes = {"mpi": "no mpi here", "nccl": "no nccl here"}
    choice = choose(gpus(2), members_of("aa"), outcomes)
    assert dict(choice.reasons) == outcomes
    assert describe(choice) == "host (not nccl: no nccl here; not mpi: no mpi here)"
    assert describe(choose(gpus(2), members_of("aaa", servers=1), {})) == ("host (not nccl, mpi: servers own the keys)")
    ring = choose(gpus(2), members_of("ab", algorithm="ring"), {})
    assert dict(ring.reasons)["nccl"] == "MPIKV_ALGORITHM=ring asks for another algorithm"
    assert choose(SAME, members_of("ab"), {}).path == "nccl"  # GPUs of the same name on two hosts
    shared = choose([*gpus(2), gpus(2)[1]], members_of("abb"), {})
    assert dict(shared.reasons)["nccl"].endswith("worker 1 on b and worker 2 on b share one")


@pytest.mark.parametrize(("hosts", "servers"), [("a", 0), ("ab", 0), ("ab", 1)])
def test_without_a_gpu_keys_are_on_the_host(hosts: str, servers: int) -> None:
    for device_path in ("auto", "host"):
        members = members_of(hosts, servers, device_path=device_path)
        last = len(members.workers) - 1
        said = f"none (not nccl, mpi, host: worker {last} on {hosts[last]} uses no GPU: CuPy is not installed)"
        assert describe(choose([*gpus(last), NONE], members, {})) == said


# What workers have, hosts, settings, outcomes of trials: what is raised, behind the setting.
REFUSED: list[tuple[list[DeviceReport], str, dict[str, Any], dict[str, str], str]] = [
    *((WITHOUT, "ab", {"device_path": path}, {}, NO_GPU) for path in ("mpi", "nccl")),
    (WITHOUT, "ab", {"algorithm": "nccl"}, {}, NO_GPU),
    *((gpus(1), "ab", {"servers": 1, "device_path": path}, {}, "servers own the keys") for path in ("mpi", "nccl")),
    (gpus(2), "ab", {"device_path": "mpi"}, {"mpi": "not built for it"}, "not built for it"),
    (SAME, "aa", {"device_path": "nccl"}, {}, "NCCL needs .* worker 0 on a and worker 1 on a share"),
    (gpus(2), "ab", {"algorithm": "nccl"}, {"nccl": "no NCCL"}, "no NCCL"),
]


@pytest.mark.parametrize(("told", "hosts", "settings", "outcomes", "text"), REFUSED)
def test_what_cannot_be(
    told: list[DeviceReport], hosts: str, settings: dict[str, Any], outcomes: dict[str, str], text: str
) -> None:
    ((name, value),) = [(name, value) for name, value in settings.items() if name != "servers"]
    with pytest.raises(ConfigError, match=f"MPIKV_{name.upper()}={value}: {text}"):
        choose(told, members_of(hosts, **settings), outcomes)


def test_what_is_wrong_whatever_the_ways() -> None:
    """Settings that ask for two paths, and what one worker cannot do, which is an error for all."""
    for path in ("mpi", "host"):
        with pytest.raises(ConfigError, match=f"_ALGORITHM=nccl, but MPIKV_DEVICE_PATH={path}: give one of the two"):
            choose(gpus(2), members_of("ab", algorithm="nccl", device_path=path), {})
    with pytest.raises(ConfigError, match="worker 1 on b: no GPU 7"):
        choose([*gpus(1), DeviceReport(error="no GPU 7")], members_of("ab"), {})


@pytest.mark.parametrize(
    ("hosts", "answers", "path", "tried"),
    [
        ("aa", {"mpi": "", "nccl": ""}, "nccl", ["nccl"]),
        ("ab", {"mpi": "", "nccl": "z"}, "mpi", ["nccl", "mpi"]),
        ("ab", {"mpi": "y", "nccl": "z"}, "host", ["nccl", "mpi"]),
        ("a", {"mpi": "y", "nccl": "z"}, "host", []),
    ],
)
def test_only_what_may_be_taken_is_tried(hosts: str, answers: dict[str, str], path: str, tried: list[str]) -> None:
    found: list[str] = []

    def trial(name: str) -> Any:
        return lambda: (found.append(name), answers[name])[1]

    choice = settle(gpus(len(hosts)), members_of(hosts), {name: trial(name) for name in answers})
    assert choice.path == path
    assert found == tried


def test_advice_only_where_values_pass_through_the_host_to_another() -> None:
    def told(hosts: str, path: Any = "host", **settings: Any) -> str:
        members = members_of(hosts, **settings)
        return advice(replace(members, device_path=path, device_reasons=(("mpi", "not built for it"),)))

    assert "not built for it" in told("ab")
    assert "docs/gpu.md" in told("ab")
    assert not told("aa")
    assert not told("ab", device_path="host")
    assert not told("ab", "mpi")
    assert not told("abc", servers=1)
