"""A worker of the jobs of `test_shared_memory.py`: `shared_program.py CASE`. Pushes large arrays through shared memory.

Prints `ready RANK PID` before it is killed, `survived` where a worker gets to the end. With MPIKV_NUM_SERVERS arrays go
through servers; then `ready` comes before the store is made, since a server gets no further. A late worker waits for
the file SIGN.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpikv import kv, optimizers

case = sys.argv[1]
N = 1_000_000  # float32: a program that does nothing else is nearly always in the middle of a call
SERVERS = int(os.environ.get("MPIKV_NUM_SERVERS", "0"))


def main() -> None:
    rank = MPI.COMM_WORLD.rank
    if case == "create":
        print(f"ready {rank} {os.getpid()}", flush=True)
        while True:
            store = kv.create("dist_sync")
            store.zeros(N)[:] = 1
            store.close()
    if SERVERS:
        print(f"ready {rank} {os.getpid()}", flush=True)
    store = kv.create("dist_sync")
    shared, own = store.zeros(N), np.zeros(N, np.float32)
    store.init(["shared", "own"], [shared, own])
    if case == "update for ever":
        store.set_optimizer(optimizers.create("sgd", learning_rate=0.1))
    if not SERVERS:
        print(f"ready {rank} {os.getpid()}", flush=True)
    messages_sent = store.stats()["messages_sent"]
    for step in range(10**9 if "for ever" in case else 5):
        shared[:], own[:] = step, 1
        store.pushpull(["shared"], [shared])
        store.pushpull("own", own)
    if case == "late":
        if rank == 0:
            print(f"waiting {os.getpid()}", flush=True)
        else:
            while not Path(os.environ["SIGN"]).exists():
                time.sleep(0.05)
        store.pushpull("own", own)
    stats = store.stats()
    assert stats.get("direct_calls", 1) > 0
    assert stats["shared_bytes"] > 0
    if SERVERS:
        # All values, and no message for them.
        assert stats["memory_bytes"] > 10 * shared.nbytes, stats
        assert stats["messages_sent"] == messages_sent, stats
    assert np.unique(shared).tolist() == [4.0 * store.num_workers]
    store.close()
    print("survived", flush=True)


if __name__ == "__main__":
    main()
