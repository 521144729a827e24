"""A worker for tests of `mpikv launch`: `launched.py CASE` in a synchronous store. The last worker misbehaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np

from mpikv import kv

STEPS = 5


def misbehave(case: str) -> None:
    if case == "exit":
        sys.exit(7)
    if case == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "abort":
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(6)


def main(case: str) -> None:
    if case == "stubborn":  # what it starts does not end by itself
        ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", ignore])
    with kv.create("dist_sync") as store:
        store.init("w", np.zeros(4, np.float32))
        for step in range(STEPS if case == "none" else 1_000_000):
            store.pushpull("w", value := np.ones(4, np.float32))
            assert value.tolist() == [store.num_workers] * 4
            if step == 1:
                print(f"worker {store.rank} is process {os.getpid()}")
            if step == 2 and store.rank == store.num_workers - 1:
                misbehave(case)
            if case != "none":
                time.sleep(0.01)
    print(f"survived {os.environ.get('COLOUR')}")


main(sys.argv[1])
