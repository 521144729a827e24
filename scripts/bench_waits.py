"""How much of an exchange in shared memory is work, and how much is waiting for each other, on one host.

    mpirun --oversubscribe --bind-to none -n 4 python scripts/bench_waits.py

For each size, by turns: `work`, the additions and copies of all ranks in shared memory, each as soon as it can, nobody
waiting for anybody; `exchange`, one `pushpull` in place of an array from `store.zeros`, which is the same work and
waits until all have come and until all are done; `raw`, one `MPI_Allreduce` in place; `barrier`, MPI's own. Before
each, every rank writes its array, as a backward pass does, so that it lies in the cache of the core that wrote it.
Times are those from the first rank's beginning to the last rank's end, medians, in microseconds.

`work / raw` is a bound: no exchange that adds and copies so much from NumPy is faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpikv import kv
from mpikv.collectives.shared import add_all
from mpikv.collectives.shared_plans import in_place_plan
from mpikv.commands.numbers import at_least, size
from mpikv.hostmemory.segment import open_host_memory

FLOAT = np.dtype(np.float32)


def main() -> None:
    """Sweep sizes; rank 0 prints one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default="64K,256K,1M,4M,16M,64M", help="default %(default)s")
    parser.add_argument("--turns", type=at_least(1), default=200, help="at most, of each size (default %(default)s)")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    rank, ranks = comm.Get_rank(), comm.Get_size()
    if ranks < 2:
        raise SystemExit("bench_waits: needs two ranks or more: mpirun -n 4 python scripts/bench_waits.py")
    memory, why = open_host_memory(rank, ranks, comm.allgather)
    if memory is None:
        raise SystemExit(f"bench_waits: the ranks share no memory: {why}")
    head = f"{'bytes':>10} {'work':>8} {'exchange':>8} {'raw':>8} {'barrier':>8}  work/raw  exchange/raw"
    with kv.create("dist_sync") as store:
        if rank == 0:
            print(f"{ranks} ranks\n{head}")
        for n_bytes in map(size, options.bytes.split(",")):
            n = n_bytes // FLOAT.itemsize
            replicas = [memory.array(one * n_bytes, n, FLOAT) for one in range(ranks)]
            plan = in_place_plan(rank, [replicas])
            raw, own = np.empty(n, FLOAT), store.zeros((n,))
            store.init(n_bytes, np.zeros(n, FLOAT))
            ways: list[tuple[np.ndarray, Callable[[], object]]] = [
                (replicas[rank], lambda: add_all(plan.chunks[0].sums)),  # noqa: B023 - called in this turn
                (own, lambda: store.pushpull(n_bytes, own)),  # noqa: B023
                (raw, lambda: comm.Allreduce(MPI.IN_PLACE, raw)),  # noqa: B023
                (raw, comm.Barrier),
            ]
            spans = measure(comm, ways, max(10, min(options.turns, (1 << 30) // n_bytes)))
            for array, _ in ways[:3]:
                if not (array == ranks).all():
                    raise SystemExit(f"bench_waits: a wrong sum of {n_bytes} bytes")
            if rank == 0:
                work, exchange, theirs, barrier = spans
                print(
                    f"{n_bytes:>10} {work:8.0f} {exchange:8.0f} {theirs:8.0f} {barrier:8.0f}"
                    f"  {work / theirs:8.2f}  {exchange / theirs:12.2f}",
                    flush=True,
                )


def measure(comm: MPI.Intracomm, ways: list[tuple[np.ndarray, Callable[[], object]]], turns: int) -> list[float]:
    """Microseconds of each way, the median of `turns`."""
    begins, ends = np.zeros((2, len(ways), turns + 3))
    for turn in range(turns + 3):
        for i, (array, way) in enumerate(ways):
            if way != comm.Barrier:
                array[:] = 1
            comm.Barrier()
            begins[i, turn] = time.perf_counter()  # the same clock for all processes of a host
            way()
            ends[i, turn] = time.perf_counter()
    first, last = np.empty_like(begins), np.empty_like(ends)
    comm.Allreduce(begins, first, MPI.MIN)
    comm.Allreduce(ends, last, MPI.MAX)
    return [float(one) for one in np.median((last - first)[:, 3:], axis=1) * 1e6]


if __name__ == "__main__":
    main()
