"""What is decided while a store is made, for the log: its ranks, MPI, shared memory, the path of arrays on GPUs."""

from __future__ import annotations

import os
from dataclasses import replace

from mpikv.config import Config
from mpikv.observe.log import StoreLog
from mpikv.placement import described, device_paths
from mpikv.placement.device_paths import DeviceReport, SettledPath
from mpikv.placement.members import Members
from mpikv.runtime import library


def log_of(members: Members, rank: int) -> StoreLog:
    """Return the log of a rank of the transport."""
    role, among = ("server", members.servers) if rank in members.servers else ("worker", members.workers)
    return StoreLog(role, among.index(rank), members.hosts[rank])


def of_process(log: StoreLog, members: Members, rank: int, device: DeviceReport) -> None:
    """Say what this process is, and by which library it sends. device: its GPU."""
    gpu = f"no GPU: {device.why_none}" if device.number is None else f"GPU {device.number} ({device.name})"
    log.rank(lambda: f"rank {rank} of {len(members.hosts)}, pid {os.getpid()}, {gpu}")
    log.job(lambda: _of_library(members.config))


def _of_library(config: Config) -> str:
    found = library.describe()
    progress = library.progress(config.progress, found.thread_level)
    return f"{found.name} {found.version}, {found.origin}; progress {progress}"


def of_members(log: StoreLog, name: str, members: Members, *, memory: bool, why_no_memory: str) -> None:
    """Say who is in the store, and how values get from one to the other.

    memory: whether this host's ranks share some. why_no_memory: why they cannot.
    """
    log.job(lambda: f"store {name!r}: {described.ranks(members)}")
    wanted = members.shares_memory
    told = replace(members, memory=memory) if wanted else members
    if members.links:
        log.job(lambda: f"links between hosts {members.link}")
    log.job(lambda: f"shared memory {described.memory(told, why_no_memory)}")
    if members.device_path != "none" or members.device_reasons:
        path = SettledPath(members.device_path, members.device_reasons)
        log.job(lambda: f"arrays on GPUs: {device_paths.describe(path)}")
