"""The first program: a straight line through points, learned by any number of workers together.

    python examples/linear_regression.py
    mpirun -n 4 python examples/linear_regression.py     (with more processes than cores: mpirun --oversubscribe -n 4 ...)

Every worker takes its share of the points, works out the gradient of the squared error there, and the trainer adds the
gradients up over the workers and moves the weights. The result does not depend on the number of workers.
"""

import numpy as np

from mpikv import kv
from mpikv.data import SplitSampler
from mpikv.parameter import Parameter
from mpikv.trainer import Trainer

TRUE_SLOPES, TRUE_OFFSET = np.array([2.0, -3.4]), 4.2
BATCH = 50  # points in a step, of all workers together


def main() -> None:
    """Learn, and print what was learned."""
    with kv.create("dist_sync") as store:  # without mpirun: one worker
        random = np.random.default_rng(seed=1)  # the same points on every worker
        x = random.standard_normal((1000, 2))
        y = x @ TRUE_SLOPES + TRUE_OFFSET + 0.01 * random.standard_normal(1000)

        slopes, offset = Parameter(np.zeros(2), "slopes"), Parameter(np.zeros(()), "offset")
        trainer = Trainer([slopes, offset], "sgd", {"learning_rate": 0.1}, kvstore=store)

        sampler = SplitSampler.for_store(len(x), store)
        share = -(-BATCH // store.num_workers)
        for epoch in range(5):
            sampler.set_epoch(epoch)
            mine = sampler.indices()
            for begin in range(0, -(-len(x) // store.num_workers), share):
                batch = mine[begin : begin + share]
                error = x[batch] @ slopes.data + offset.data - y[batch]
                slopes.grad = 2 * x[batch].T @ error
                offset.grad = 2 * error.sum()
                trainer.step(BATCH)
            if store.rank == 0:
                loss = np.mean((x @ slopes.data + offset.data - y) ** 2)
                print(f"epoch {epoch}: mean squared error {loss:.6f}")

        if store.rank == 0:
            print(f"learned y = {slopes.data[0]:.3f} a {slopes.data[1]:+.3f} b {offset.data:+.3f}")
            print(f"true    y = {TRUE_SLOPES[0]:.3f} a {TRUE_SLOPES[1]:+.3f} b {TRUE_OFFSET:+.3f}")


if __name__ == "__main__":
    main()
