"""A training that is killed from outside, for tests of `mpikv launch --restarts`: `killed_program.py JSON`.

JSON: `way`, who saves the state, a function below; `store`, its type; `codec` of the gradients, "" for none; `kills`,
how many runs of the job are killed; `folder`, where the killer makes a file `killed-RUN` then. The last worker waits
for it before it closes the store, so that no run ends before it was killed.

Worker 0 prints `run R at MOMENT`, and in the end a digest of the weights, which is another one where an example was
used twice or left out. In an asynchronous store it prints none.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import mpikv
from mpikv import data, kv

EXAMPLES, EPOCHS = 40, 2
N_ELEMS = 20_000  # of the long weight, which is cut
PAUSE_S = 0.01  # between two steps, so that the killer meets different ones
LIMIT_S = 60  # for a killer that has failed
EXAMPLE = np.random.default_rng(0).standard_normal((EXAMPLES, 5))


class Run:
    """One run of the job."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.number = mpikv.Config.from_environ().restart
        self.is_killed, self.killed = self.number < case["kills"], Path(case["folder"], f"killed-{self.number}")
        self.store = kv.create(case["store"])
        self.codec = {"type": case["codec"], "force": True} if case["codec"] else None

    def at(self, moment: str) -> None:
        if self.store.rank == 0:
            print(f"run {self.number} at {moment}")

    def stepped(self, steps: int) -> None:
        self.at(f"step {steps}")
        time.sleep(PAUSE_S)

    def close(self) -> None:
        self.at("close")
        until = time.monotonic() + LIMIT_S
        while self.is_killed and not self.killed.exists() and self.store.rank == self.store.num_workers - 1:
            assert time.monotonic() < until, "nobody has killed this run"
            time.sleep(PAUSE_S)
        self.store.close()


def gradient(weight: np.ndarray, example: np.ndarray) -> np.ndarray:
    return np.cos(weight + np.resize(example, weight.shape)).astype(weight.dtype)


def parameters() -> list[mpikv.Parameter]:
    return [mpikv.Parameter(np.arange(5.0)), mpikv.Parameter(np.linspace(-1, 1, N_ELEMS, dtype=np.float32))]


def trainer(run: Run, **changes: Any) -> list[np.ndarray]:
    """A Trainer, in any store."""
    params, store = parameters(), run.store
    one = mpikv.Trainer(params, "adam", {"learning_rate": 0.1}, store, compression_params=run.codec, **changes)
    run.at("resume")
    begun, start = divmod(one.examples if one.resume() else 0, EXAMPLES)
    sampler = data.SplitSampler.for_store(EXAMPLES, store)
    for epoch in range(begun, EPOCHS):
        sampler.set_epoch(epoch, start)
        for i in sampler:
            for parameter in params:
                parameter.grad[...] = gradient(parameter.data, EXAMPLE[i])
            one.step(batch_size=store.num_workers)
            run.stepped(one.steps)
        start, one.examples = 0, (epoch + 1) * EXAMPLES  # those that did not divide are left out
    return [parameter.data for parameter in params]


def clipping(run: Run) -> list[np.ndarray]:
    """A Trainer whose workers make all updates themselves."""
    return trainer(run, clip_global_norm=1.0)


def local(run: Run) -> list[np.ndarray]:
    """Workers that train by themselves, with a momentum of their own, and exchange behind computing."""
    params, store = parameters(), run.store
    own = mpikv.Trainer(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=None)
    one = mpikv.LocalUpdates(params, store, every=4, outer="nesterov", optimizer=own, compression=run.codec, delay=1)
    run.at("resume")
    one.resume()
    sampler = data.SplitSampler.for_store(EXAMPLES, store)
    while one.steps < EPOCHS * len(sampler):
        epoch, step = divmod(one.steps, len(sampler))
        sampler.set_epoch(epoch)
        for parameter in params:
            parameter.grad[...] = gradient(parameter.data, EXAMPLE[sampler.indices()[step]])
        own.step()
        one.step()
        run.stepped(one.steps)
    one.exchange()
    return [parameter.data for parameter in params]


def snapshots(run: Run) -> list[np.ndarray]:
    """A loop of its own, with a loader whose place is saved."""
    arrays, store = [parameter.data for parameter in parameters()], run.store
    sums = [np.zeros_like(array) for array in arrays]
    store.init([*range(len(sums))], sums)
    loader = data.DataLoader(EXAMPLE, 1, sampler=data.SplitSampler.for_store(EXAMPLES, store))
    saved = mpikv.Snapshots(store, {"short": arrays[0], "long": arrays[1], "loader": loader})
    run.at("resume")
    saved.resume()
    for epoch in range(loader.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for example in loader:
            for key, (array, total) in enumerate(zip(arrays, sums, strict=True)):
                store.pushpull(key, gradient(array, example), out=total)
                np.subtract(array, 0.1 * total, out=array)
            saved.step(examples=store.num_workers)
            run.stepped(saved.steps)
    return arrays


def main(text: str) -> None:
    case = json.loads(text)
    run = Run(case)
    weights = {one.__name__: one for one in (trainer, clipping, local, snapshots)}[case["way"]](run)
    if run.store.rank == 0 and "async" not in case["store"]:
        print(f"weights {hashlib.sha256(b''.join(array.tobytes() for array in weights)).hexdigest()}")
    run.close()


main(sys.argv[1])
