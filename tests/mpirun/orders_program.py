"""Workers with several stores, in which they do not make their calls in one order: `orders_program.py CASE`.

Prints `survived` where a worker gets to the end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpikv import kv

case = sys.argv[1]
world = MPI.COMM_WORLD
kind = sys.argv[2]
ONES = np.ones(3, np.float32)


def store_on(*ranks: int) -> kv.KVStore | None:
    """A store of some ranks; None elsewhere."""
    comm = world.Split(0 if world.rank in ranks else MPI.UNDEFINED)
    if world.rank not in ranks:
        return None
    store = kv.create(kind, comm=comm)
    store.init("w", ONES)
    store.set_optimizer("test")
    return store


if case == "two pushpulls":
    stores = [store_on(0, 1, 2), store_on(0, 1, 2)]
    if world.rank == 1:
        stores.reverse()
    for store in stores:
        store.pushpull("w", ONES.copy())
else:  # "late": worker 0 waits for worker 1, which waits for worker 2, which comes when the test tells it to
    stores = [store for store in (store_on(1, 2), store_on(0, 1)) if store is not None]
    if world.rank == 2:
        while not Path(os.environ["SIGN"]).exists():
            time.sleep(0.01)
for store in stores:
    store.close()
print("survived", flush=True)
