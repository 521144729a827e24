"""A worker of the jobs that are told to stop: `stop_program.py CASE TYPE`.

Prints `ready RANK PID` when it trains, and at the end `RANK stopped after N of M steps` with the steps that it and the
furthest worker made.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

from mpikv import kv

case, kind = sys.argv[1:3]
world = MPI.COMM_WORLD
MANY = 20_000  # steps, of some milliseconds: far more than a test waits for


def own_handler(_signum, _frame) -> None:
    # os.write: it may run inside another print, which forbids a second one.
    os.write(1, f"{world.rank} handler of its own\n".encode())


def main() -> None:
    if case == "own handler":
        signal.signal(signal.SIGUSR1, own_handler)
    print(f"pid {world.rank} {os.getpid()}", flush=True)  # also of a server rank, which stays in `create`
    store = kv.create(kind)
    store.init("w", np.zeros(3, np.float32))
    if "async" in kind:
        store.set_optimizer("test")
    store.barrier()
    print(f"ready {world.rank}", flush=True)
    done = 0
    for _ in range(MANY):
        store.pushpull("w", np.ones(3, np.float32))
        done += 1
        if store.stop_requested:
            break
        time.sleep(0.002)
    steps = np.zeros(store.num_workers, np.int64)
    steps[store.rank] = done
    if "async" not in kind:
        store.init("steps", steps)
        store.pushpull("steps", steps)
    if case != "stays open":
        store.close()
    print(f"{world.rank} stopped after {done} of {steps.max()} steps", flush=True)


if __name__ == "__main__":
    main()
