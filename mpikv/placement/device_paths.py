"""Which path keys in GPUs' memory take between the workers of a store: one value, which all settle on when it is made.

Every worker tells whether it uses a GPU, and which. The first of these paths that can be gone is taken, or the one that
MPIKV_DEVICE_PATH names:

- `ipc`: all workers are on one host, share memory there, and read of each other's device memory what was written;
- `nccl`: each worker has a GPU of its own, and all could make a communicator of NCCL. The order of its sums, and so
  their last bits, is NCCL's own;
- `mpi`: the MPI library takes device memory on every host;
- `staged`: always;
- `host`: keys are in host memory, since some worker has no GPU.

Where servers own the keys, `mpi` and `staged` say how values get to them from a worker's GPU, and back.

Whether `ipc`, `nccl` and `mpi` work is tried, by all together, once nothing better is left and nothing else speaks
against them: so `choose` takes the outcomes of what has been tried, and is asked again after each trial. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast, get_args

from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.placement.members import DevicePath, Members

PATHS: tuple[DevicePath, ...] = get_args(DevicePath)  # the best first


class Told(NamedTuple):
    """What one rank says of its GPU, in values that JSON has.

    number: of the GPU that it uses, None where it uses none, and `why_none` then. error: why it cannot do what its
    settings ask for.
    """

    number: int | None = None
    uuid: str = ""
    name: str = ""
    why_none: str = "nothing asked for one"
    error: str = ""


class SettledPath(NamedTuple):
    """The path, and why it is none of the better ones."""

    path: DevicePath
    reasons: tuple[tuple[str, str], ...]

    def of(self, members: Members) -> Members:
        """The members with this choice."""
        return replace(members, device_path=self.path, device_reasons=self.reasons)


def choose(told: Sequence[Told], members: Members, outcomes: Mapping[str, str]) -> SettledPath:
    """The path of keys in device memory.

    told: by each worker. members: with what is known of the memory that ranks share. outcomes: why a path that was
    tried cannot be gone, "" where it can; one that was not tried counts as good. Raises ConfigError where
    MPIKV_DEVICE_PATH, MPIKV_ALGORITHM or MPIKV_LOCAL_DEVICE asks for what cannot be done.
    """
    called = [f"worker {i} on {host}" for i, host in enumerate(members.worker_hosts)]
    for one, name in zip(told, called, strict=True):
        if one.error:
            raise ConfigError(f"kv.create: {name}: {one.error}")
    wanted, setting = _wanted(members.config)
    against = _against(told, members, called, outcomes)
    path: DevicePath
    if wanted is None:
        path = next(one for one in PATHS if not against[one])
    elif against[wanted]:
        raise ConfigError(f"kv.create: {setting}: {against[wanted]}")
    else:
        path = wanted
        against = {one: why or f"{setting} asks for another" for one, why in against.items()}
    reasons = {one: against[one] for one in PATHS[: PATHS.index(path)] if against[one]}
    return SettledPath(path, tuple(reasons.items()))


def settle(told: Sequence[Told], members: Members, trials: Mapping[str, Callable[[], str]]) -> SettledPath:
    """`choose`, with the trials that it takes. Collective where trials are.

    trials: by path: says on every rank why the path cannot be gone, "" where it can.
    """
    outcomes: dict[str, str] = {}
    while True:
        choice = choose(told, members, outcomes)
        if choice.path not in trials or choice.path in outcomes:
            return choice
        outcomes[choice.path] = trials[choice.path]()


def _wanted(config: Config) -> tuple[DevicePath | None, str]:
    """The path that the settings ask for, None where they leave it open, and the setting that does."""
    path, setting = config.device_path, f"MPIKV_DEVICE_PATH={config.device_path}"
    if config.algorithm == "nccl":
        if path not in ("auto", "nccl"):
            raise ConfigError(f"kv.create: MPIKV_ALGORITHM=nccl, but {setting}: give one of the two")
        path, setting = "nccl", "MPIKV_ALGORITHM=nccl"
    return None if path == "auto" else cast(DevicePath, path), setting


def _against(
    told: Sequence[Told], members: Members, called: Sequence[str], outcomes: Mapping[str, str]
) -> dict[str, str]:
    """Why paths cannot be gone, "" of those that can."""
    without = [
        f"{name} uses no GPU: {one.why_none}" for one, name in zip(told, called, strict=True) if one.number is None
    ]
    if without:
        return {path: without[0] if path != "host" else "" for path in PATHS}
    against: dict[str, str] = {path: outcomes.get(path, "") for path in PATHS}
    if members.path == "servers":
        against |= dict.fromkeys(("ipc", "nccl"), "servers own the keys")
        if members.shares_memory and len(_hosts(members)) == 1:
            against["mpi"] = "servers are reached through the memory of their host"
        return against
    n_hosts = len(set(members.worker_hosts))
    if n_hosts > 1:
        against["ipc"] = f"the workers are on {n_hosts} hosts"
    elif len(told) > 1 and not members.shares_memory:
        against["ipc"] = "the workers share no memory of their host (MPIKV_SHARED_MEMORY, MPIKV_ALGORITHM, mpikv info)"
    other = members.config.algorithm not in ("auto", "nccl")
    asked = f"MPIKV_ALGORITHM={members.config.algorithm} asks for another algorithm" if other else ""
    against["nccl"] = asked or _shared_gpu(told, members.worker_hosts, called) or against["nccl"]
    return against


def _hosts(members: Members) -> set[str]:
    return {members.hosts[rank] for rank in (*members.workers, *members.servers)}


def _shared_gpu(told: Sequence[Told], hosts: Sequence[str], called: Sequence[str]) -> str:
    """Say which workers share a GPU, which NCCL does not take; "" where none do."""
    seen: dict[tuple[str, str], str] = {}
    for one, host, name in zip(told, hosts, called, strict=True):
        first = seen.setdefault((host.partition("/")[0], one.uuid), name)
        if first is not name:
            return f"NCCL needs a GPU for each worker, and {first} and {name} share one"
    return ""


def describe(choice: SettledPath) -> str:
    """One line for a reader: the path, and why not the better ones."""
    by_reason: dict[str, list[str]] = {}
    for path, why in choice.reasons:
        by_reason.setdefault(why, []).append(path)
    text = "; ".join(f"not {', '.join(paths)}: {why}" for why, paths in by_reason.items())
    return choice.path + (f" ({text})" if text else "")


def stats(members: Members) -> dict[str, Any]:
    """What `store.stats()` says of the path."""
    return {"device_path": members.device_path, "device_path_reasons": dict(members.device_reasons)}


def advice(members: Members) -> str:
    """What to tell the user of values that pass through the host on their way to another one; "" elsewhere."""
    asked_for = members.config.device_path == "staged"
    if members.device_path != "staged" or len(_hosts(members)) == 1 or asked_for:
        return ""
    why = dict(members.device_reasons).get("mpi", "")
    return (
        f"mpikv: arrays on GPUs are copied through host memory on their way to other hosts, since MPI takes no device "
        f"memory ({why}); docs/gpu.md says how to get a CUDA-aware MPI, MPIKV_DEVICE_PATH=staged is silent"
    )
