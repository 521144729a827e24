"""What rank 0 finds out by a child process, while the other ranks wait.

`trial_program.py trial SOURCE=LIMIT_S ...` lets a child try each source and prints what came out, as JSON.
`trial_program.py find_out SOURCE` asks the whole question, of a driver with four GPUs and a library that says yes
(this machine's need not); each rank prints what rank 0 sends it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

from mpikv.runtime import cuda_aware, cuda_driver, library

library.prepare()
from mpi4py import MPI  # noqa: E402


def trials(words: list[str]) -> None:
    for word in words:
        name, limit_s = word.split("=")
        answer = cuda_aware.trial(library.describe().path, 3, source=f"trial_memories:{name}", limit_s=float(limit_s))
        print(json.dumps([name, *answer]), flush=True)


def find_out(name: str) -> cuda_aware.CudaSupport:
    said_yes = dataclasses.replace(library.describe(), cuda=True)
    library.describe = lambda: said_yes
    cuda_driver.ask = lambda: cuda_driver.Devices(("A2",) * 4, "CUDA 12.4")
    return cuda_aware.find_out(3, source=f"trial_memories:{name}", limit_s=120)


answer = None
if MPI.COMM_WORLD.Get_rank() == 0:
    if sys.argv[1] == "trial":
        trials(sys.argv[2:])
    else:
        answer = find_out(sys.argv[2])
    assert MPI.COMM_SELF.allreduce(1) == 1  # MPI still works here
done = MPI.COMM_WORLD.Ibarrier()  # does not spin, unlike Barrier
while not done.Test():
    time.sleep(0.05)
answer = MPI.COMM_WORLD.bcast(answer)
if answer is not None:
    print(answer, flush=True)
