"""PyTorch's Gloo as a contender: torch.distributed.all_reduce on tensors that share the arrays' memory.

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

GLOO, GLOO_BUCKETS = "Gloo", "Gloo, DDP's buckets"


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
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{socket.gethostname()}:{probe.getsockname()[1]}"


def contender(job: BenchJob, pattern: Pattern, arrays: Sequence[HostArray]) -> Contender:
    """Make the contender of all_reduce, inside a `process_group`: of one array in place, of several as DDP has them.

    DistributedDataParallel copies gradients, the last one first, into buckets, the first one of 1 MiB and the others of
    25 MiB, starts each when it is full, and copies the sums back (docs of `bucket_cap_mb`).
    """
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    tensors: list[Any] = [torch.from_numpy(array).view(-1) for array in arrays]
    if len(tensors) == 1:
        return sums_in_place(GLOO, pattern, arrays, lambda: dist.all_reduce(tensors[0]))
    buckets: list[list[Any]] = [[]]
    for tensor in reversed(tensors):
        if sum(one.nbytes for one in buckets[-1]) >= (1 if len(buckets) == 1 else 25) << 20:
            buckets.append([])
        buckets[-1].append(tensor)
    flat = [torch.empty(sum(map(len, bucket)), dtype=tensors[0].dtype) for bucket in buckets]

    def run() -> None:
        under_way = []
        for bucket, buf in zip(buckets, flat, strict=True):
            torch.cat(bucket, out=buf)
            under_way.append(dist.all_reduce(buf, async_op=True))
        for bucket, buf, work in zip(buckets, flat, under_way, strict=True):
            work.wait()
            for tensor, values in zip(bucket, buf.split(list(map(len, bucket))), strict=True):
                tensor.copy_(values)

    return sums_in_place(GLOO_BUCKETS, pattern, arrays, run)
