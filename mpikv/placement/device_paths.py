"""The choice of the path for keys in GPUs' memory: one value for a store, which all workers agree on when it is made.

Every worker reports whether it uses a GPU, and which. The path is the first of `PATHS` that works for all workers, or
the one that MPIKV_DEVICE_PATH names; docs/gpu.md ("Which way arrays go") says what each of them needs. `none`: keys are
in host memory, since some worker has no GPU. Where servers own the keys, values from a worker's GPU go to them, and
back, by the path `host`.

Whether `nccl` and `mpi` work is found out by a trial, in which all workers take part. A path is tried only when no
better one works and nothing else rules it out: so `choose` takes the outcomes of the trials made so far, and `settle`
calls it again after each trial. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast, get_args

from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.placement.members import DevicePath, Members

PATHS: tuple[DevicePath, ...] = get_args(DevicePath)  # the best first


class DeviceReport(NamedTuple):
    """What one rank reports of its GPU, in values that JSON has.

    number: of the GPU that it uses; None: it uses none, for the reason `why_none`. error: why it cannot do what its
    settings ask for.
    """

    number: int | None = None
    uuid: str = ""
    name: str = ""
    why_none: str = "nothing asked for one"
    error: str = ""


class SettledPath(NamedTuple):
    path: DevicePath
    reasons: tuple[tuple[str, str], ...]

    def of(self, members: Members) -> Members:
        return replace(members, device_path=self.path, device_reasons=self.reasons)


def choose(reports: Sequence[DeviceReport], members: Members, outcomes: Mapping[str, str]) -> SettledPath:
    """Choose the path of keys in device memory.

    reports: of each worker. outcomes: for each path that was tried why it does not work, "" where it does; a path that
    was not tried counts as one that works. Raises ConfigError where MPIKV_DEVICE_PATH, MPIKV_ALGORITHM or
    MPIKV_LOCAL_DEVICE asks for what cannot be done.
    """
    names = [f"worker {i} on {host}" for i, host in enumerate(members.worker_hosts)]
    for report, name in zip(reports, names, strict=True):
        if report.error:
            raise ConfigError(f"kv.create: {name}: {report.error}")
    wanted, setting = _wanted(members.config)
    obstacles = _obstacles(reports, members, names, outcomes)
    if wanted is None:
        if len(reports) == 1 and members.workers_own and not obstacles["host"]:  # then nothing is tried
            obstacles |= dict.fromkeys(("nccl", "mpi"), "there is one worker")
        path = next(one for one in PATHS if not obstacles[one])
    elif wanted == "host" and obstacles["host"]:
        path = "none"
    elif obstacles[wanted]:
        raise ConfigError(f"kv.create: {setting}: {obstacles[wanted]}")
    else:
        path = wanted
        obstacles = {one: why or f"{setting} asks for another" for one, why in obstacles.items()}
    reasons = {one: obstacles[one] for one in PATHS[: PATHS.index(path)] if obstacles[one]}
    return SettledPath(path, tuple(reasons.items()))


def settle(reports: Sequence[DeviceReport], members: Members, trials: Mapping[str, Callable[[], str]]) -> SettledPath:
    """Call `choose`, and make the trials that it needs. trials: why a path does not work, "" where it does."""
    outcomes: dict[str, str] = {}
    while True:
        choice = choose(reports, members, outcomes)
        if choice.path not in trials or choice.path in outcomes:
            return choice
        outcomes[choice.path] = trials[choice.path]()


def _wanted(config: Config) -> tuple[DevicePath | None, str]:
    path, setting = config.device_path, f"MPIKV_DEVICE_PATH={config.device_path}"
    if config.algorithm == "nccl":
        if path not in ("auto", "nccl"):
            raise ConfigError(f"kv.create: MPIKV_ALGORITHM=nccl, but {setting}: give one of the two")
        path, setting = "nccl", "MPIKV_ALGORITHM=nccl"
    return None if path == "auto" else cast(DevicePath, path), setting


def _obstacles(
    reports: Sequence[DeviceReport], members: Members, names: Sequence[str], outcomes: Mapping[str, str]
) -> dict[str, str]:
    obstacles: dict[str, str] = {path: outcomes.get(path, "") for path in PATHS}
    for report, name in zip(reports, names, strict=True):
        if report.number is None:
            return obstacles | dict.fromkeys(("nccl", "mpi", "host"), f"{name} uses no GPU: {report.why_none}")
    if not members.workers_own:
        return obstacles | dict.fromkeys(("nccl", "mpi"), "servers own the keys")
    other = members.config.algorithm not in ("auto", "nccl")
    asked = f"MPIKV_ALGORITHM={members.config.algorithm} asks for another algorithm" if other else ""
    obstacles["nccl"] = asked or _shared_gpu(reports, members.worker_hosts, names) or obstacles["nccl"]
    return obstacles


def _shared_gpu(reports: Sequence[DeviceReport], hosts: Sequence[str], names: Sequence[str]) -> str:
    """Return which workers share a GPU, which NCCL does not allow; "" where none do."""
    seen: dict[tuple[str, str], str] = {}
    for one, host, name in zip(reports, hosts, names, strict=True):
        first = seen.setdefault((host.partition("/")[0], one.uuid), name)
        if first is not name:
            return f"NCCL needs a GPU for each worker, and {first} and {name} share one"
    return ""


def describe(choice: SettledPath) -> str:
    """Return a line for the user: the path, and why it is none of the better ones."""
    by_reason: dict[str, list[str]] = {}
    for path, why in choice.reasons:
        by_reason.setdefault(why, []).append(path)
    text = "; ".join(f"not {', '.join(paths)}: {why}" for why, paths in by_reason.items())
    return choice.path + (f" ({text})" if text else "")


def stats(members: Members) -> dict[str, Any]:
    return {"device_path": members.device_path, "device_path_reasons": dict(members.device_reasons)}


def advice(members: Members) -> str:
    """Return a warning where values are copied through host memory on their way to other hosts; else ""."""
    unavoidable = not members.workers_own or len(set(members.worker_hosts)) == 1
    if members.device_path != "host" or unavoidable or members.config.device_path == "host":
        return ""
    why = dict(members.device_reasons).get("mpi", "")
    return (
        f"mpikv: arrays on GPUs are copied through host memory on their way to other hosts, since MPI takes no device "
        f"memory ({why}); docs/gpu.md says how to get a CUDA-aware MPI, MPIKV_DEVICE_PATH=host is silent"
    )
