"""`mpikv info`: what this installation is made of, for a reader and for a report of a problem.

Alone it describes this process; under `mpirun` rank 0 describes the job. It also works where things are wrong: without
MPI it says how to get one, beside a wrong `MPIKV_*` variable it says what is valid, and a launcher of another MPI than
the library is an error that names both.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpikv._version import __version__
from mpikv.arrays import compiled
from mpikv.arrays.devices import CUPY_PACKAGES
from mpikv.collectives import nccl_setup
from mpikv.collectives.nccl import Nccl
from mpikv.config import ALL, AUTO_INTERFACE, Config, unknown_variables, variables_in_force
from mpikv.create import worker_device
from mpikv.create.spec import parse as spec_of
from mpikv.errors import ConfigError
from mpikv.hostmemory import segment
from mpikv.placement import device_paths
from mpikv.placement.members import Members
from mpikv.placement.topology import pretended, topology
from mpikv.runtime import cuda_aware, cuda_driver, interface, launcher, library
from mpikv.server.roles import assign
from mpikv.spaces.gpu import Gpu

# What each array library's packages are called: CuPy's name says which CUDA it was built for.
ARRAY_LIBRARIES = {
    "numpy": ("numpy",),
    "ml_dtypes": ("ml_dtypes",),
    "cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x"),
    "torch": ("torch",),
    "jax": ("jax",),
}


MANY_HOSTS = 16  # no more are listed


class Fact(NamedTuple):
    """One line of the report; problem: what is wrong with it."""

    label: str
    text: str
    problem: bool = False


def show(environ: Mapping[str, str] | None = None) -> int:
    """Print the report, and return the status to exit with. Collective over COMM_WORLD where there is one."""
    environ = os.environ if environ is None else environ
    rank, rows = _mpi_rows(environ)
    rows = [*_own_rows(), *([_gpu_row(environ)] if rank == 0 else []), *rows, *_variable_rows(environ)]
    failed = any(row.problem for row in rows)
    if rank == 0:
        width = max(len(row.label) for row in rows)
        for row in rows:
            print(f"{row.label:{width}}  {'ERROR: ' if row.problem else ''}{row.text}".rstrip())
        sys.stdout.flush()
    elif failed:
        launcher.let_rank_0_speak(1.0)  # not longer: after MPI_Finalize rank 0's end does not end this process
    return 1 if failed else 0


def _own_rows() -> Iterator[Fact]:
    """Describe what needs no MPI."""
    cores = len(os.sched_getaffinity(0))
    yield Fact("mpikv", f"{__version__}, Python {platform.python_version()}, {cores} cores on {socket.gethostname()}")
    found = []
    for name, packages in ARRAY_LIBRARIES.items():
        for package in packages:
            version = _version(package)
            if version:
                found.append(f"{name} {version}" + (f" ({package})" if package != name else ""))
    yield Fact("array libraries", ", ".join(found))
    yield Fact("codecs", compiled.describe())


def _gpu_row(environ: Mapping[str, str]) -> Fact:
    """Say which GPUs rank 0 sees, and which of them it would use: its local rank is 0. Asks CuPy if there is a GPU."""
    devices = cuda_driver.ask()
    if devices.problem:
        return Fact("GPU", f"none: {devices.problem}")
    try:
        used = worker_device.describe(_config(environ).local_device, 0, len(devices.names))
    except ConfigError as error:
        return Fact("GPU", str(error), problem=True)
    names = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in Counter(devices.names).items())
    return Fact("GPU", f"{names} ({devices.version}); in use: {used}{_of_cupy()}")


def _of_cupy() -> str:
    """Say what is wrong with CuPy, by which arrays get to a GPU; "" where nothing is."""
    if not cuda_driver.has_cupy():
        return f"; {cuda_driver.NO_CUPY}"
    try:
        import cupy  # noqa: PLC0415 - only where there is a GPU: it takes a second

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # noqa: BLE001 - a CuPy for another CUDA than the driver's fails in many ways
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return f"; CuPy cannot use it: {text}; the packages are {CUPY_PACKAGES}"
    return ""


def _config(environ: Mapping[str, str]) -> Config:
    try:
        return Config.from_environ(environ)
    except ConfigError:
        return Config()  # the row of the wrong variable says so


def _mpi_rows(environ: Mapping[str, str]) -> tuple[int, list[Fact]]:
    """Return this process's rank, and what is known of MPI."""
    said_rank = launcher.said_rank(environ)
    config = _config(environ)
    started_by = launcher.find(environ)
    try:
        library.prepare(config.interface, config.timeout_s, config.stall_warn_s)
        from mpi4py import MPI  # noqa: PLC0415 - importing it initialises MPI

        library.check_launcher(MPI.COMM_WORLD.Get_size())
    except library.NoLibraryError as error:
        # Alone this is how things are; a launcher's ranks, though, would be jobs of one rank each.
        return said_rank, [Fact("MPI library", f"none: {error}", problem=started_by is not None)]
    except interface.InterfaceError as error:
        # Perhaps of this host alone: then rank 0, which waits for this rank in MPI_Init, will never speak.
        if said_rank != 0 and launcher.said_local_rank(environ) == 0:
            sys.stdout.write(f"rank {said_rank}: ERROR: {error}\n")
            sys.stdout.flush()
        return said_rank, [Fact("network", str(error), problem=True)]
    except ConfigError as error:
        return said_rank, [Fact("MPI library", str(error), problem=True)]
    found = library.describe()
    comm = MPI.COMM_WORLD
    choice = interface.choose(found.name, config.interface)
    chosen = ", ".join(map(str, choice.interfaces))
    told = comm.allgather((socket.gethostname(), chosen))
    hosts = [host for host, _ in told]
    rows = [
        Fact("MPI library", f"{found.name} {found.version} (MPI {found.standard}), {found.origin}"),
        Fact("", found.path or "its file cannot be told"),
        Fact("mpi4py", _version("mpi4py")),
        Fact("started by", str(started_by) if started_by else "itself, without mpirun"),
        Fact("thread level", found.thread_level),
        Fact("fault tolerance", _FAULT_TOLERANCE[found.fault_tolerance]),
        *_failure_rows(found.fault_tolerance, hosts, config, environ),
        *_device_rows(comm, hosts, config),
        Fact("progress", library.progress(config.progress, found.thread_level)),
        _memory_row(comm, hosts, config),
        *_network_rows(dict(told), choice, config),
        *_host_rows(hosts),
        _role_row(hosts, config),
    ]
    return comm.Get_rank(), rows


def _device_rows(comm: Any, hosts: list[str], config: Config) -> list[Fact]:
    """Say at rank 0 whether MPI takes device memory, and how arrays on GPUs travel in a `dist_sync_device` store.

    Rank 0 finds the first out, and perhaps tries it, while the others wait for its row. That workers of a host can open
    each other's memory, and that all can make a communicator of NCCL where they have the same one, is taken for
    granted: a store tries both when it is made.
    """
    rank, spec = comm.Get_rank(), spec_of("dist_sync_device")
    found = worker_device.find(spec, config, topology(hosts).local_rank[rank])
    told = comm.allgather(found.told)
    by_nccl = "some rank uses no GPU"
    if all(one.number is not None for one in told):
        number, names = found.told.number or 0, [f"rank {i} on {host}" for i, host in enumerate(hosts)]
        by_nccl = nccl_setup.why_not(lambda: Nccl(Gpu(number)), names, rank, comm.allgather)
    if rank:
        return []
    device = 0 if config.local_device == worker_device.AUTO else int(config.local_device)
    where = f"; asked on {hosts[0]}" if len(set(hosts)) > 1 else ""
    answer = cuda_aware.find_out(device)
    rows = [Fact("CUDA-aware MPI", f"{answer}{where}")]
    try:
        places = pretended(hosts, config.test_hosts)
        roles = assign(places, config.num_servers, config.server_placement)
        members = Members(places, roles.workers, roles.servers, config=config)
        outcomes = {"mpi": "" if answer.aware else answer.why, "nccl": by_nccl}
        choice = device_paths.choose([told[worker] for worker in roles.workers], members, outcomes)
    except ConfigError as error:
        # No mistake yet on a machine without a GPU, such as a login node; and the row of the roles says of servers.
        serious = str(error).startswith("kv.create") and not cuda_driver.ask().problem
        return [*rows, Fact("arrays on GPUs", str(error), problem=serious)]
    return [*rows, Fact("arrays on GPUs", device_paths.describe(choice))]


_FAULT_TOLERANCE = {
    "no": "no",
    "built in, off": "built in, off (mpirun --with-ft ulfm switches it on)",
    "on": "on",
}


def _failure_rows(fault_tolerance: str, hosts: list[str], config: Config, environ: Mapping[str, str]) -> Iterator[Fact]:
    """Say what it takes that ranks go on without those that die, where that is asked for."""
    if config.on_failure != "continue":
        return
    from mpikv.create import survivors  # noqa: PLC0415 - importing it initialises MPI

    try:
        survivors.check(fault_tolerance, config)
        survivors.check_hosts(hosts, environ)
    except ConfigError as error:
        yield Fact("on failure", str(error), problem=len(hosts) > 1)  # alone it is no mistake yet
    else:
        held = "each worker holds, and updates, all values and optimizer states; in dist_async two owners of a key do"
        yield Fact("on failure", f"the others go on: {held}")


def _memory_row(comm: Any, hosts: list[str], config: Config) -> Fact:
    """Say whether these ranks could share memory as workers of one store; found out by doing it."""
    if config.shared_memory == "off":
        return Fact("shared memory", "off: MPIKV_SHARED_MEMORY")
    if len(hosts) == 1:
        return Fact("shared memory", "one rank: nobody to share with")
    try:
        places = pretended(hosts, config.test_hosts)
    except ConfigError:
        places = tuple(hosts)  # the row of the roles says what is wrong
    if len(set(places)) == len(places):
        return Fact("shared memory", "one rank on each host: nobody to share with")
    here = [rank for rank, place in enumerate(places) if place == places[comm.Get_rank()]]
    _, problem = segment.open_host_memory(
        here.index(comm.Get_rank()),
        len(here),
        lambda data: [told[rank] for told in [comm.allgather(data)] for rank in here],
    )
    problems = {f"{hosts[rank]}: {text}" for rank, text in enumerate(comm.allgather(problem)) if text}
    if problems:
        return Fact("shared memory", f"no: {'; '.join(sorted(problems))}; messages do the work")
    return Fact("shared memory", "yes, between the ranks of a host")


def _host_rows(hosts: list[str]) -> Iterator[Fact]:
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    yield Fact("ranks", f"{len(hosts)} on {len(by_host)} host{'s' * (len(by_host) > 1)}")
    if len(by_host) <= MANY_HOSTS:
        for host, ranks in by_host.items():
            yield Fact("", f"{host}: {ranges(ranks)}")


def _network_rows(chosen: Mapping[str, str], choice: interface.InterfaceChoice, config: Config) -> Iterator[Fact]:
    """Describe the interfaces of each host, what is set for the library, and what the user has set."""
    if config.interface == AUTO_INTERFACE:
        yield Fact("network", "auto: the library's own choice of interfaces")
        return
    ours = " ".join(f"{name}={text}" for name, text in choice.variables.items())
    yield Fact("network", f"{config.interface}: {ours or 'nothing is set'}")
    if choice.own:
        own = " ".join(f"{name}={text}" for name, text in choice.own.items())
        yield Fact("", f"{own} is set already and counts more")
    shown = list(chosen.items())[:MANY_HOSTS]
    for host, text in shown:
        yield Fact("", f"{host}: {text}")
    if len(chosen) > len(shown):
        yield Fact("", f"... and {len(chosen) - len(shown)} more hosts")


def _role_row(real_hosts: list[str], config: Config) -> Fact:
    try:
        hosts = pretended(real_hosts, config.test_hosts)
        roles = assign(hosts, config.num_servers, config.server_placement)
    except ConfigError as error:
        # One process that asks for servers is a program looked at without its mpirun: no mistake yet.
        return Fact("roles", str(error), problem=len(real_hosts) > 1)
    text = f"workers: ranks {ranges(roles.workers)}"
    return Fact("roles", f"{text}; servers: ranks {ranges(roles.servers)}" if roles.servers else f"{text}; no servers")


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers in short: `0-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _variable_rows(environ: Mapping[str, str]) -> Iterator[Fact]:
    """Describe every `MPIKV_*` variable that is set, what is wrong with it, and names that nothing reads."""
    known = {variable.name: variable for variable in ALL}
    unknown = unknown_variables(environ)
    in_force = variables_in_force(environ)
    for name, text in in_force.items():
        if name in unknown:
            nearest = unknown[name]
            hint = f"; {nearest} exists" if nearest else f"; there are {', '.join(known)}"
            yield Fact(name, f"{text}  (nothing reads this variable{hint})")
            continue
        try:
            if text.strip():
                known[name].parse(text.strip())
        except ValueError as error:
            yield Fact(name, f"{text!r} {error}", problem=True)
        else:
            yield Fact(name, text)
    if not in_force:
        yield Fact("MPIKV_* variables", "none in force")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
