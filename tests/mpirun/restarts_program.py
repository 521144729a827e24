"""A worker for tests of restarts: `restarts_program.py CASE`, a Trainer's 12 steps.

After step 6, and a snapshot of an earlier one, the last worker is killed in the first run (`kill`), or it raises in its
seventh step in every run (`raise`). `requeue`: it is killed when a batch script was asked to stop, and when the job has
gone on later, after step 9 of that. Worker 0 prints the step that it begins with, and the weights in the end.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import mpikv
from mpikv import kv
from mpikv.common.snapshot_names import in_folder, whole

STEPS, FAULT, LATER = 12, 6, 9


def main(case: str) -> None:
    config = mpikv.Config.from_environ()
    with kv.create("dist_sync") as store:
        weight = mpikv.Parameter(np.arange(5.0))
        trainer = mpikv.Trainer([weight], "adam", {"learning_rate": 0.1}, store)
        begun = trainer.resume()
        if store.rank == 0:
            print(f"begins with step {begun}")
        for step in range(begun, STEPS):
            if case == "raise" and step == FAULT and store.rank == store.num_workers - 1:
                raise ValueError("a number that is wrong each time")
            weight.grad[...] = np.cos(weight.data + step) * (store.rank + 1)
            trainer.step()
            is_time = config.restart == 0 and trainer.steps == (LATER if begun else FAULT)
            if case in ("kill", "requeue") and is_time and store.rank == store.num_workers - 1:
                die(config.snapshot_dir, asked=case == "requeue" and not begun)
        if store.rank == 0:
            print(f"weights {weight.data.tolist()}")


def die(snapshots: str, *, asked: bool) -> None:
    """Be killed when a thread of each worker has written its share of a snapshot. asked: and when all are to stop."""
    while not whole(in_folder(snapshots)) or (asked and not os.path.exists(os.environ["MPIKV_STOP_ASKED"])):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


main(sys.argv[1])
