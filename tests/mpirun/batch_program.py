"""The program of batch jobs that are asked to stop: `batch_program.py trains|imports|evaluates`.

What takes long waits for the file that GO names: before the store is made, or after the last step.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
from mpi4py import MPI

import mpikv
from mpikv import kv


def wait(what: str) -> None:
    print(what, MPI.COMM_WORLD.rank, flush=True)
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.02)


case = sys.argv[1]
if case == "imports":
    wait(case)
store = kv.create("dist_sync")
weights = mpikv.Parameter(np.zeros(3, np.float32))
trainer = mpikv.Trainer([weights], "sgd", kvstore=store)
for step in range(2 if case == "evaluates" else 100_000):
    weights.grad[:] = 1
    trainer.step()
    print("step", step, flush=True)
    time.sleep(0.01)
if case == "evaluates":
    wait(case)
store.close()
