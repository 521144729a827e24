"""The ranks of the tests of faults and signals: workers that exchange a key until something happens.

looping.py CASE, with
- forever: until the job is ended, or stopped by a signal of MPIKV_STOP_SIGNALS;
- raises, exits: worker 1 raises in its tenth step, or leaves with status 3.

Each worker prints `worker N of W is HOST PID` when all have exchanged five times, and `worker N stops after step S`
where it has been asked to stop.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import numpy as np

from mpikv import kv

READY, FAULT = 5, 10
PAUSE_S = 0.02  # between steps: this is no test of speed


def main(case: str) -> None:
    with kv.create("dist_sync") as store:
        value = np.zeros(1000, np.float32)
        store.init("w", value)
        step = 0
        while True:
            step += 1
            value[:] = step
            store.pushpull("w", value)
            assert (value == step * store.num_workers).all()
            if step == READY:
                print(f"worker {store.rank} of {store.num_workers} is {socket.gethostname()} {os.getpid()}", flush=True)
            if step == FAULT and store.rank == 1 and case == "raises":
                raise RuntimeError("boom on one worker")
            if step == FAULT and store.rank == 1 and case == "exits":
                sys.exit(3)
            if store.stop_requested:
                print(f"worker {store.rank} stops after step {step}", flush=True)
                break
            time.sleep(PAUSE_S)


main(sys.argv[1])
