"""A worker for tests of `mpikv launch --on-failure continue`: `going_on.py FILE [CASE]`, rounds until there is a FILE.

The last worker misbehaves after some rounds; `early CASE`: before it has a store; `late`: when it has closed it.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time

import numpy as np

from mpikv import kv
from mpikv.runtime import abort
from mpikv.session.workers import Workers


def misbehave(case: str) -> None:
    if case == "exit":
        os._exit(3)
    if case == "raise":
        raise RuntimeError("boom")
    if case == "abort":
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(6)


def main(file: str, case: str = "") -> None:
    _, early, case = case.rpartition("early ")
    if early and os.environ["OMPI_COMM_WORLD_RANK"] == "2":
        misbehave(case)
    with kv.create("dist_sync") as store:
        me, last = store.rank, store.rank == store.num_workers - 1
        store.init("w", np.zeros(2))
        done, rounds = False, 0
        print(f"worker {me} of {store.num_workers} is {socket.gethostname()} {os.getpid()}")
        while not done:
            value = np.array([1.0, os.path.exists(file)])
            store.pushpull("w", value)
            assert value[0] == store.num_workers
            done, rounds = value[1] > 0, rounds + 1
            if last and rounds == 3:
                misbehave(case)
            time.sleep(0.01)
        # Nothing is left of earlier generations.
        gc.collect()
        assert [one for one in gc.get_objects() if isinstance(one, Workers)] == [store.session.now.session]
        assert abort.guard().activities[1:] == [store.session.activity]
        print(f"worker {me} ends as one of {store.num_workers}")
    if last and case == "late":
        sys.exit(5)


main(*sys.argv[1:])
