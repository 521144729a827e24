"""The first program: a straight line through points, learned by any number of workers together.

    python examples/linear_regression.py
    mpikv launch -n 2 -s 0 python examples/linear_regression.py

Every worker takes its share of the points and works out the gradient of the squared error there; the trainer adds the
gradients up over the workers and moves the weights. What is learned does not depend on the number of workers.
"""

import numpy as np
from usage import Parser

from mpikv import Parameter, SplitSampler, Trainer, kv

TRUE_SLOPES, TRUE_OFFSET = np.array([2.0, -3.4]), 4.2


def main() -> None:
    """Learn, and print what was learned."""
    Parser(__doc__).parse_args()  # --help
    with kv.create("dist_sync") as store:  # without mpirun: one worker
        random = np.random.default_rng(seed=1)  # the same points on every worker
        x = random.standard_normal((1000, 2))
        y = x @ TRUE_SLOPES + TRUE_OFFSET + 0.01 * random.standard_normal(1000)
        mine = SplitSampler.for_store(len(x), store, last="uneven").indices()

        slopes, offset = Parameter(np.zeros(2), "slopes"), Parameter(np.zeros(()), "offset")
        trainer = Trainer([slopes, offset], "sgd", {"learning_rate": 0.1}, kvstore=store)

        for step in range(51):
            error = x[mine] @ slopes.data + offset.data - y[mine]
            slopes.grad = 2 * x[mine].T @ error
            offset.grad = 2 * error.sum()
            trainer.step(batch_size=len(x))  # the gradients are sums over the points of all workers
            if store.rank == 0 and step % 10 == 0:
                print(f"step {step}: mean squared error of this worker's points {np.mean(error**2):.6f}")

        if store.rank == 0:
            print(f"learned y = {slopes.data[0]:.3f} a {slopes.data[1]:+.3f} b {offset.data:+.3f}")
            print(f"true    y = {TRUE_SLOPES[0]:.3f} a {TRUE_SLOPES[1]:+.3f} b {TRUE_OFFSET:+.3f}")


if __name__ == "__main__":
    main()
