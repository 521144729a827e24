"""Workers with different batch sizes, then with different rates: `labels_program.py CASE`.

CASE: `sizes`, or who makes the update that different rates are for: `store` or `workers`.

Prints `right` where a worker has gone through all steps with the right weights.
"""

from __future__ import annotations

import sys

import numpy as np

import mpikv
from mpikv import kv

N = 100_003  # several chunks, segments and partitions, cut at no even place
STEPS = ((4, 4, 4), (4, 2, 1), (4, 4, 4), (2, 2, 2), (2, 2, 8))

with kv.create("dist_sync", config=mpikv.Config.from_environ().with_(partition_bytes=1 << 16)) as store:
    rank, workers = store.rank, store.num_workers
    trainers = {}
    for on_store in (True, False):
        parameters = {"w": mpikv.Parameter(np.zeros(N, np.float32)), "b": mpikv.Parameter(np.zeros(1, np.float32))}
        trainer = mpikv.Trainer(parameters, "sgd", {"learning_rate": 0.5}, kvstore=store, update_on_kvstore=on_store)
        trainers[on_store] = trainer
        expected = 0.0
        for sizes in STEPS:
            for parameter in parameters.values():
                parameter.grad[...] = rank + 1
            trainer.step(sizes[rank])
            expected -= 0.5 * sum((r + 1) / sizes[r] for r in range(workers))
            for parameter in parameters.values():
                assert (parameter.data == np.float32(expected)).all(), (sizes, parameter.data, expected)
    if sys.argv[1] != "sizes":
        trainer = trainers[sys.argv[1] == "store"]
        trainer.set_learning_rate(0.5 + 0.25 * rank)
        trainer.step(1)
    print("right", rank)
