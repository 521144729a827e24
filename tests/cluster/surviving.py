"""The ranks of tests of lost hosts: `surviving.py FILE`, a Trainer's epochs until there is such a file.

The weights count how often each example was used: in every epoch once, however many workers there were.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import numpy as np

import mpikv
from mpikv import data, kv

EXAMPLES = 31
PAUSE_S = 0.02


def main(file: str) -> None:
    with kv.create("dist_sync") as store:
        weight, enough = mpikv.Parameter(np.zeros(EXAMPLES)), np.zeros(1)
        trainer = mpikv.Trainer([weight], "sgd", {"learning_rate": 1.0}, store)
        begun = trainer.resume()
        store.init("enough", enough)
        run, where = mpikv.Config.from_environ().restart, f"{socket.gethostname()} {os.getpid()}"
        print(f"run {run}: worker {store.rank} of {store.num_workers} is {where} at step {begun}")
        sampler = data.SplitSampler.for_store(EXAMPLES, store, last="uneven")
        epoch, start = divmod(trainer.examples, EXAMPLES)
        while enough[0] < store.num_workers:
            sampler.set_epoch(epoch, start)
            mine = sampler.indices()
            for step, first in enumerate(range(start, EXAMPLES, store.num_workers)):
                together = min(store.num_workers, EXAMPLES - first)
                weight.grad[...] = 0.0
                weight.grad[mine[step : step + 1]] = -together
                trainer.step(batch_size=together)
                time.sleep(PAUSE_S)
            epoch, start = epoch + 1, 0
            assert weight.data.tolist() == [epoch] * EXAMPLES
            enough[:] = os.path.exists(file)
            store.pushpull("enough", enough)
        print(f"worker {store.rank} has made {trainer.steps} steps")


main(sys.argv[1])
