"""What the scripts that measure across links share: hosts made for one job, and the job run on them.

Each host is a network namespace of this machine (`tests/cluster/namespaces.py`). The job runs the calling script again,
once for each rank, with `--rank` before its own arguments. Needs root. Blocks until the job has ended.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "cluster")]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that describe links and library."""
    parser.add_argument("--rate", type=float, default=200, help="Mbit/s of each link in each direction (default 200)")
    parser.add_argument("--mtu", type=int, default=1500, help="bytes of the longest packet (default 1500)")
    parser.add_argument(
        "--queue-kib", type=int, help="what waits before a link at most; default: what it carries in 20 ms"
    )
    parser.add_argument("--mpi", choices=("openmpi", "mpich"), default="openmpi")
    parser.add_argument("--mca", action="append", default=[], help="NAME=VALUE, an MCA parameter for Open MPI")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)


def run(
    options: argparse.Namespace,
    n_hosts: int,
    ranks_per_host: int | Sequence[int],
    *,
    timeout_s: float = 1200,
    words: Sequence[str] = (),
    rates: Mapping[str, float] | None = None,
) -> int:
    """Make the hosts, run this script as a job on them, print its output, remove the hosts; the job's status.

    words: more arguments of the script, after its own. rates: of links that are not as `--rate` says, by host.
    """
    import jobs  # noqa: PLC0415 - beside the tests; ranks do not need them
    from namespaces import missing, network  # noqa: PLC0415

    reason = missing()
    mpi = jobs.find_mpi(options.mpi)
    if reason or mpi is None:
        print(reason or f"no {options.mpi} in this environment", file=sys.stderr)
        return 1
    # Each host has a /dev/shm of its own: not the folder there that `jobs` makes on this machine.
    parameters = [*["btl_sm_backing_directory=/dev/shm"] * (mpi.kind == "openmpi"), *options.mca]
    extra: Sequence[str] = [word for one in parameters for word in ("--mca", *one.split("=", 1))]
    n_ranks = n_hosts * ranks_per_host if isinstance(ranks_per_host, int) else sum(ranks_per_host)
    queue = {} if options.queue_kib is None else {"queue": f"limit {options.queue_kib}kb"}
    with network(n_hosts, options.rate or None, options.mtu, rates, **queue) as hosts:
        job = jobs.mpirun(
            n_ranks,
            ["python", sys.argv[0], "--rank", *sys.argv[1:], *words],
            mpi=hosts.mpi(mpi),
            options=[*hosts.options(mpi, ranks_per_host), *extra],
            timeout_s=timeout_s,
            env={name: value for name, value in os.environ.items() if name.startswith("MPIKV_")},
        )
    print(job.output if job.status == 0 else f"{job.output}status {job.status}", flush=True)
    return job.status


def sent_bytes() -> int:
    """What this host's interface has sent."""
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def quiet_barrier(comm: Any) -> None:
    """Wait for the other ranks without taking the processors from those that still have something to do."""
    waiting = comm.Ibarrier()
    while not waiting.Test():
        time.sleep(0.001)
