"""PyTorch's Gloo as a contender: torch.distributed.all_reduce in place, on tensors that share the arrays' memory.

The processes find each other through a file in a temporary directory that rank 0 makes and MPI tells; so all ranks must
see the same directory, which ranks of one host do. Across hosts they meet by TCP at rank 0's address instead.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.raw import sums_in_place
from mpikv.errors import ConfigError

GLOO = "Gloo"


def check_torch(wanted_by: str) -> None:
    """Raise ConfigError where PyTorch is missing; it says how to get it."""
    try:
        found = importlib.util.find_spec("torch")
    except ValueError:  # it was taken away from this process
        found = None
    if found is None:
        raise ConfigError(f"{wanted_by} needs PyTorch: pip install torch")


@contextlib.contextmanager
def process_group(job: BenchJob, *, wanted: bool) -> Iterator[None]:
    """Let torch.distributed run over the ranks of the job inside the block. Collective."""
    if not wanted:
        yield
        return
    import torch.distributed as dist  # noqa: PLC0415 - an extra, and slow to import

    folder = tempfile.mkdtemp(prefix="mpikv-bench-") if job.rank == 0 else ""
    method = f"file://{folder}/rendezvous" if len(job.host_names) == 1 else f"tcp://{_address()}"
    method = job.comm.bcast(method)
    try:
        dist.init_process_group("gloo", init_method=method, rank=job.rank, world_size=job.size)
        yield
        job.comm.Barrier()
        dist.destroy_process_group()
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _address() -> str:
    """Return this host's name and a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{socket.gethostname()}:{probe.getsockname()[1]}"


def contender(job: BenchJob, pattern: Pattern, arrays: Sequence[HostArray]) -> Contender:
    """Make one all_reduce per array, inside a `process_group`. All are started before the first is waited for."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    tensors: list[Any] = [torch.from_numpy(array) for array in arrays]

    def run() -> None:
        if len(tensors) == 1:
            dist.all_reduce(tensors[0])
            return
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    return sums_in_place(GLOO, pattern, arrays, run)
