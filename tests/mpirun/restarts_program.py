"""A worker for tests of `mpikv launch --restarts`: `restarts_program.py CASE`, a Trainer's 12 steps.

After step 6, and a snapshot of an earlier one, the last worker is killed in the first run (`kill`), or it raises in its
seventh step in every run (`raise`). Worker 0 prints the step that it begins with, and the weights in the end.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import mpikv
from mpikv import kv
from mpikv.common.snapshot_names import in_folder, whole

STEPS, FAULT = 12, 6


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
            if trainer.steps == FAULT and store.rank == store.num_workers - 1:
                while case == "kill" and not whole(in_folder(config.snapshot_dir)):
                    pass  # until the thread that writes the share has done so
                if case == "kill" and config.restart == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        if store.rank == 0:
            print(f"weights {weight.data.tolist()}")


main(sys.argv[1])
