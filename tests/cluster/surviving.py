"""The ranks of the test of a lost host: `surviving.py FILE`, a Trainer's steps until there is such a file."""

from __future__ import annotations

import os
import socket
import sys
import time

import numpy as np

import mpikv
from mpikv import kv

PAUSE_S = 0.02


def main(file: str) -> None:
    with kv.create("dist_sync") as store:
        weight, steps = mpikv.Parameter(np.zeros(3)), np.zeros(1)
        trainer = mpikv.Trainer([weight], "sgd", {"learning_rate": 1.0}, store)
        begun = trainer.resume()
        store.init("enough", steps)
        print(f"worker {store.rank} of {store.num_workers} is {socket.gethostname()} {os.getpid()} at step {begun}")
        while True:
            weight.grad[...] = -1.0
            trainer.step()
            steps[:] = os.path.exists(file)
            store.pushpull("enough", steps)
            if steps[0] == store.num_workers:
                break
            time.sleep(PAUSE_S)
        assert weight.data.tolist() == [trainer.steps] * 3
        print(f"worker {store.rank} has made {trainer.steps} steps")


main(sys.argv[1])
