"""A line through points, learned by any number of workers: docs/tutorial.md starts it in one way after the other."""

import sys

import numpy as np

from mpikv import Parameter, SplitSampler, Trainer, kv

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
random = np.random.default_rng(seed=1)  # the same points on every worker
x = random.standard_normal(1000)
y = 2 * x + 3

with kv.create("dist_sync") as store:
    line = Parameter(np.zeros(2), "line")  # slope and offset
    trainer = Trainer([line], "sgd", {"learning_rate": 0.1}, kvstore=store)
    done = trainer.resume()  # from MPIKV_STOP_FILE, if there is one: how many steps were made before
    if store.rank == 0:
        print(f"workers: {store.num_workers}, epochs done: {done}", flush=True)
    sampler = SplitSampler.for_store(len(x), store, seed=1, last="uneven")
    for epoch in range(done, epochs):
        sampler.set_epoch(epoch)
        mine = sampler.indices()  # this worker's points of the epoch, in a new order
        error = line.data[0] * x[mine] + line.data[1] - y[mine]
        line.grad = np.array([(error * x[mine]).sum(), error.sum()])
        trainer.step(batch_size=len(x))  # gradients are sums over the points of all workers
    if store.rank == 0:
        print(f"y = {line.data[0]:.2f} x + {line.data[1]:.2f}")
