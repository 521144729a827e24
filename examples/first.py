"""Every worker pushes a gradient, an owner updates the weight: mpikv launch -n 4 -s 0 python examples/first.py"""

import numpy as np

from mpikv import kv, optimizers

with kv.create("dist_sync") as store:
    store.init("weight", np.full(3, 10.0))
    store.set_optimizer(optimizers.create("sgd", learning_rate=0.1))
    store.push("weight", np.full(3, store.rank + 1.0))  # the gradient of worker 0 is 1, of worker 1 it is 2, ...
    weight = store.pull("weight")
    if store.rank == 0:
        print("workers:", store.num_workers, weight)
