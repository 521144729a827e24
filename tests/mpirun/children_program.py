"""A rank whose children are to outlive the signal that stops the job: `children_program.py CASE`.

model: training with a loader of two processes, which has to give some more batches after the signal, before `saved` is
printed. processes: children of every kind that Python can start; then `saved`, when all have ended as a
parent ends them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

SLEEP = "import time; print('begun', flush=True); time.sleep(600)"


def sleep(begun) -> None:
    begun.set()
    time.sleep(600)


def processes() -> None:
    import numpy as np  # here, since children that are started anew import this file

    from mpikv import kv

    store = kv.create("dist_sync")
    store.init("w", np.zeros(3))
    children = []
    for kind in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(kind)
        begun = context.Event()
        children.append(context.Process(target=sleep, args=(begun,)))
        children[-1].start()
        begun.wait()
    for ours in (None, lambda: None):  # with and without Python's hooks at a fork
        children.append(subprocess.Popen([sys.executable, "-c", SLEEP], stdout=-1, preexec_fn=ours))  # noqa: PLW1509
        children[-1].stdout.readline()
    store.barrier()
    print(f"ready {store.rank} {os.getpid()}", flush=True)
    while not store.stop_requested:
        store.pushpull("w", np.ones(3))
        time.sleep(0.002)
    for child in children:
        child.terminate()
        status = child.wait() if isinstance(child, subprocess.Popen) else (child.join(), child.exitcode)[1]
        assert status == -signal.SIGTERM, (child, status)
    print(f"saved {store.rank}", flush=True)
    store.close()


def training() -> None:
    import torch

    import mpikv.torch as mt
    from mpikv import kv

    store = kv.create("dist_sync")
    net = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.ones(100_000, 2), torch.ones(100_000, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
    model = mt.DistributedModel(net, store)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches: Iterator = iter(loader)
    for step, (inputs, targets) in enumerate(batches):
        if step == 3:
            print(f"ready {store.rank} {os.getpid()}", flush=True)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if store.stop_requested:
            break
        time.sleep(0.002)
    for _ in range(8):  # more than its workers have made in advance
        next(batches)
    print(f"saved {store.rank}", flush=True)


if __name__ == "__main__":
    processes() if sys.argv[1] == "processes" else training()
