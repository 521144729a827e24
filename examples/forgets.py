"""A mistake, and what becomes of it: mpikv launch -n 2 -s 0 python examples/forgets.py"""

import numpy as np

from mpikv import kv

with kv.create("dist_sync") as store:
    store.init(["a", "b"], [np.zeros(2), np.zeros(2)])
    store.push("a", np.ones(2))
    if store.rank != 1:  # worker 1 forgets to push b
        store.push("b", np.ones(2))
    store.pull("b")
