"""The ranks of this benchmark, and what they run on.

All traffic of the benchmark itself, raw MPI included, goes over a duplicate of COMM_WORLD of its own.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpikv._version import __version__
from mpikv.config import Config, variables_in_force
from mpikv.runtime import abort, library

if TYPE_CHECKING:
    from mpi4py import MPI

NAP_S = 2e-4


@dataclass(frozen=True)
class BenchJob:
    """The ranks of a benchmark.

    comm: the benchmark's own. hosts: the host of each of its ranks. config: what the environment says.
    """

    comm: MPI.Intracomm
    rank: int
    size: int
    hosts: tuple[str, ...]
    config: Config

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.hosts))

    @property
    def ranks_per_host(self) -> int:
        """How many ranks the host with most of them has."""
        return max(map(self.hosts.count, self.hosts))

    @property
    def cores(self) -> int:
        return len(os.sched_getaffinity(0))

    def quiet_barrier(self) -> None:
        """Wait for all ranks, asleep, since they may share a core with one that measures. Collective."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(NAP_S)


def open_job(config: Config) -> BenchJob:
    """Initialise MPI, and wait for the other ranks. Collective over COMM_WORLD, blocks."""
    library.prepare(config.interface, config.timeout_s, config.stall_warn_s)
    from mpi4py import MPI  # noqa: PLC0415 - importing it initialises MPI

    world = MPI.COMM_WORLD
    if world.Get_size() > 1:
        abort.install(world.Get_rank(), world.Get_size())
    library.check_launcher(world.Get_size())
    return job_of(world.Dup(), config)


def job_of(comm: MPI.Comm, config: Config) -> BenchJob:
    """Make a job of the ranks of `comm`, an intracommunicator, which it keeps. Collective."""
    hosts = tuple(comm.allgather(socket.gethostname()))
    return BenchJob(cast("MPI.Intracomm", comm), comm.Get_rank(), comm.Get_size(), hosts, config)


def describe(job: BenchJob) -> dict[str, Any]:
    """Return machine, versions and settings, for the header and for JSON. Local."""
    found = library.describe()
    return {
        "machine": {
            "cpu": cpu_model(),
            "cores": job.cores,
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.release()}",
            "ranks": job.size,
            "hosts": {host: job.hosts.count(host) for host in job.host_names},
        },
        "versions": {
            "mpikv": __version__,
            "mpi": f"{found.name} {found.version}",
            "mpi_origin": found.origin,
            "mpi_thread_level": found.thread_level,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "settings": asdict(job.config),
        "variables": variables_in_force(None),
    }


def header(found: Mapping[str, Any]) -> list[str]:
    machine, versions, settings = found["machine"], found["versions"], found["settings"]
    hosts = ", ".join(f"{host}: {ranks}" for host, ranks in machine["hosts"].items())
    defaults = asdict(Config())
    changed = [f"{name} {value}" for name, value in settings.items() if value != defaults[name]]
    many = "s" * (len(machine["hosts"]) > 1)
    return [
        f"# mpikv {versions['mpikv']}, Python {versions['python']}, NumPy {versions['numpy']}",
        f"# {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}",
        f"# {machine['ranks']} ranks on {len(machine['hosts'])} host{many} ({hosts})",
        f"# {versions['mpi']} ({versions['mpi_origin']}), thread level {versions['mpi_thread_level']}",
        f"# settings: {', '.join(changed) if changed else 'the defaults'}",
    ]


def cpu_model() -> str:
    """Return the name that /proc/cpuinfo gives, else the architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, text = line.partition(":")
            if name.strip() == "model name":
                return text.strip()
    return platform.machine()
