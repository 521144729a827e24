"""The ranks of the tests of placements: where each one is, what it is, and that the store works across all of them.

Synchronous, with as many servers as MPIKV_NUM_SERVERS says.

Prints one line `found {json}` on worker 0: `hosts`, the host of each rank; `local`, each rank's place on its host as
the launcher has it; `servers`, the ranks that are none of the workers; `map`, [rank, worker, host] of each worker; and
`sum`, what a pushpull of worker + 1 gave.
"""

from __future__ import annotations

import json
import os
import socket

import numpy as np
from mpi4py import MPI

from mpikv import kv

LOCAL = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")  # Open MPI, MPICH, srun


def main() -> None:
    world = MPI.COMM_WORLD
    local = next((int(os.environ[name]) for name in LOCAL if name in os.environ), -1)
    ranks = world.allgather((socket.gethostname(), local))
    with kv.create("dist_sync") as store:
        worker, workers = store.rank, store.num_workers
        # One row for each worker, filled by it alone, and summed: servers cannot take part in a gather.
        table = np.zeros((workers, 2))
        store.init("table", table)
        table[worker] = world.Get_rank(), worker + 1
        store.pushpull("table", table)
        total = np.full(3, worker + 1.0)
        store.init("sum", total)
        store.pushpull("sum", total)
        if worker == 0:
            of_workers = [int(rank) for rank in table[:, 0]]
            found = {
                "hosts": [host for host, _ in ranks],
                "local": [place for _, place in ranks],
                "servers": [rank for rank in range(world.Get_size()) if rank not in of_workers],
                "map": [[int(rank), int(number) - 1, ranks[int(rank)][0]] for rank, number in table],
                "sum": total.tolist(),
            }
            print("found " + json.dumps(found), flush=True)


main()
