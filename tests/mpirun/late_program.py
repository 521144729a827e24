"""Worker 0 waits for worker 1 in one store, worker 1 for worker 2 in another one: `late_program.py TYPE`.

Worker 2 is late: it comes once there is a file $FOLDER/go. Prints `survived` where a worker gets to the end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpikv import kv

world = MPI.COMM_WORLD
stores = []
for ranks in ((1, 2), (0, 1)):
    comm = world.Split(0 if world.rank in ranks else MPI.UNDEFINED)
    if world.rank in ranks:
        stores.append(kv.create(sys.argv[1], comm=comm))
        stores[-1].init("w", np.ones(3, np.float32))
        stores[-1].set_optimizer("test")
while world.rank == 2 and not Path(os.environ["FOLDER"], "go").exists():
    time.sleep(0.01)
for store in stores:
    store.close()
print("survived", flush=True)
