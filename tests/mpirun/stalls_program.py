"""Three workers of which one stays away: `stalls_program.py CASE RANK`.

Who stays away comes once there is a file $FOLDER/go; the others come together. Prints `survived` where a worker gets to
the end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from mpikv import kv
from mpikv.runtime import launcher

case, victim = sys.argv[1], int(sys.argv[2])
go = Path(os.environ["FOLDER"], "go")


def sleep_in_python() -> None:
    while not go.exists():
        time.sleep(0.01)


def with_a_helper(store: kv.KVStore) -> None:
    """Two stores, each used by one thread at a time; on one worker a thread makes the call that the others wait for."""
    with kv.create("dist_sync") as second:
        second.init("c", np.zeros(3, np.float32))

        def late() -> None:
            sleep_in_python()
            second.pushpull("c", np.ones(3, np.float32))

        if store.rank != victim:
            second.pushpull("c", np.ones(3, np.float32))
            store.pushpull("b", np.ones(3, np.float32))
            return
        helper = threading.Thread(target=late)
        helper.start()
        store.pushpull("b", np.ones(3, np.float32))
        helper.join()


if case == "before_create":
    from mpi4py import MPI  # noqa: F401 - so that all have come to MPI_Init
if case.startswith("before") and victim == (rank := launcher.said_rank(os.environ)):
    sleep_in_python()
elif case.startswith("before"):
    go.with_name(f"comes {rank}").touch()
    while len(list(go.parent.glob("comes *"))) < 2:
        time.sleep(0.01)
with kv.create("dist_sync") as store:
    store.init(["a", "b"], [np.zeros(3, np.float32)] * 2)
    if case == "helper":
        with_a_helper(store)
    elif store.rank == victim and not case.startswith("before"):
        print(f"rank {victim} stays away", flush=True)
        if case == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        sleep_in_python()
    store.pushpull("a", np.ones(3, np.float32))
print("survived", flush=True)
