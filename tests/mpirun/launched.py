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
    if case == "raise":
        raise RuntimeError("not my day")
    if case == "exit":
        sys.exit(7)
    if case == "leave":
        os._exit(5)
    if case == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "abort":
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(6)


def main(case: str) -> None:
    if case in ("stubborn", "daemon"):  # what it starts does not end by itself
        ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", ignore], start_new_session=case == "daemon")
    with kv.create("dist_sync") as store:
        store.init("w", np.zeros(4, np.float32))
        for step in range(STEPS if case in ("none", "daemon") else 1_000_000):
            store.pushpull("w", value := np.ones(4, np.float32))
            assert value.tolist() == [store.num_workers] * 4
            if step == 1:
                print(f"worker {store.rank} is process {os.getpid()}")
            if step == 2 and store.rank == store.num_workers - 1:
                misbehave(case)
            if case not in ("none", "daemon"):
                time.sleep(0.01)
    print(f"survived {os.environ.get('COLOUR')}")


main(sys.argv[1])
