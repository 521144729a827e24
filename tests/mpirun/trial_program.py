"""Rank 0 lets a child try each source of memory, while the other ranks wait: `trial_program.py SOURCE=LIMIT_S ...`.

Prints what came out, as JSON.
"""

from __future__ import annotations

import json
import sys
import time

from mpikv.runtime import cuda_aware, library

library.prepare()
from mpi4py import MPI  # noqa: E402

if MPI.COMM_WORLD.Get_rank() == 0:
    for word in sys.argv[1:]:
        name, limit_s = word.split("=")
        answer = cuda_aware.trial(library.describe().path, 3, source=f"trial_memories:{name}", limit_s=float(limit_s))
        print(json.dumps([name, *answer]), flush=True)
    assert MPI.COMM_SELF.allreduce(1) == 1  # MPI still works here
done = MPI.COMM_WORLD.Ibarrier()  # does not spin, unlike Barrier
while not done.Test():
    time.sleep(0.05)
