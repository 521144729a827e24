"""The trials by which the workers of a store settle on the paths of keys in device memory (device_paths.py).

Each is made by all of them together while the store is made, and all hear how it went.

Cost: some messages by all to all; for `mpi` a child process on one rank of each host, about two seconds; for
`nccl` a communicator, which the store uses from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mpikv.collectives.nccl import Nccl, NcclComm
from mpikv.collectives.nccl_setup import make_communicator
from mpikv.hostmemory.segment import HostMemory
from mpikv.placement import device_paths
from mpikv.placement.device_paths import DeviceReport
from mpikv.placement.members import Members
from mpikv.runtime import cuda_aware
from mpikv.spaces.gpu import Gpu

if TYPE_CHECKING:
    from mpikv.session.processes import Processes  # importing it initialises MPI


def settled(
    members: Members,
    announced: Sequence[DeviceReport],
    memory: HostMemory | None,
    processes: Processes,
    gpu: Gpu | None,
) -> tuple[Members, NcclComm | None]:
    """With the paths of keys in device memory, and this worker's rank of a communicator where some go by NCCL.

    announced: by each worker of its GPU. gpu: this rank's. Collective where a worker asks for a GPU. Raises
    ConfigError on all ranks where what the settings ask for cannot be done.
    """
    if all(one == DeviceReport() for one in announced):
        return members, None
    if members.workers_own:
        members = replace(members, memory=memory is not None)
    made: NcclComm | None = None

    def by_nccl() -> str:
        nonlocal made
        assert gpu is not None  # it is tried where all have one, and there are no servers
        own = gpu
        made, problem = make_communicator(
            lambda: Nccl(own),
            [f"worker {i} on {host}" for i, host in enumerate(members.worker_hosts)],
            processes.transport.rank,
            processes.gather,
            members.config.timeout_s,
            gpus=[f"{host} {one.uuid}" for host, one in zip(members.worker_hosts, announced, strict=True)],
            take=own.take,
        )
        return problem

    trials = {"mpi": lambda: _takes_device_memory(members, processes, gpu), "nccl": by_nccl}
    return device_paths.settle(announced, members, trials).of(members), made


def _takes_device_memory(members: Members, processes: Processes, gpu: Gpu | None) -> str:
    """Why MPI takes no device memory, "" where it does on every host. Collective; one rank of each host asks."""
    transport = processes.transport
    workers = [rank for rank in members.workers if transport.hosts[rank] == transport.hosts[transport.rank]]
    answer = ""
    if workers and workers[0] == transport.rank:
        try:
            found = cuda_aware.find_out(0 if gpu is None else gpu.number)
            answer = "" if found.aware else f"on {transport.hosts[transport.rank]} {found.why}"
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait to hear of it
            answer = f"on {transport.hosts[transport.rank]} the trial failed: {type(error).__name__}: {error}"
    return next((text.decode() for text in processes.gather(answer.encode()) if text), "")
