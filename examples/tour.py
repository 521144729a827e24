"""A tour of the store, call by call, after MXNet's key-value store tutorial.

    python examples/tour.py
    mpikv launch -n 2 -s 0 python examples/tour.py

The same program in both: with two workers every sum has twice as many terms.
"""

import numpy as np
from usage import Parser

from mpikv import KVStore, kv, optimizers

SHAPE = (2, 3)


def allreduce(data: np.ndarray, name: str, store: KVStore) -> np.ndarray:
    """The sum of all workers' `data`, in place. The same name serves again and again, for data of one shape."""
    if name not in store:
        store.init(name, np.zeros_like(data))
    store.push(name, data)
    store.pull(name, data)
    return data


def main() -> None:
    """Show each call and what came of it."""
    Parser(__doc__).parse_args()  # --help
    with kv.create("dist_sync") as store:
        rank, num_workers = store.rank, store.num_workers

        def show(what: str, value: object) -> None:
            if rank == 0:
                print(f"{what}:\n{value}")

        show("this store", f"{store.type}, {num_workers} worker{'s' if num_workers > 1 else ''}")

        # A key gets its first value once; worker 0's is kept.
        store.init("3", np.full(SHAPE, 2.0))
        show("after init with 2", store.pull("3"))

        # Pull into memory of one's own: here two arrays, say of two devices.
        devices = [np.empty(SHAPE), np.empty(SHAPE)]
        store.pull("3", out=devices)
        show("pulled to two devices", devices)

        # Push one array for each of three devices: they are added, then added over the workers.
        store.push("3", [np.ones(SHAPE)] * 3)
        show("after a push of 1 from each of three devices", store.pull("3"))

        # Several keys in one call.
        keys = ["5", "7", "9"]
        store.init(keys, [np.zeros(SHAPE)] * 3)
        store.push(keys, [np.full(SHAPE, i + 1.0) for i in range(3)])
        show("three keys after a push of 1, 2 and 3", [float(value[0, 0]) for value in store.pull(keys)])

        # Without an optimizer, push then pull is a sum over the workers.
        show("the sum of the ranks, from 1 on", allreduce(np.array([rank + 1.0]), "sum", store))
        show("the sum of their squares", allreduce(np.array([(rank + 1.0) ** 2]), "sum", store))

        # With an optimizer, what is pushed is a gradient, and what is pulled the new weight.
        store.set_optimizer(optimizers.create("sgd", learning_rate=0.1))
        store.init("weight", np.full(SHAPE, 10.0))
        gradient = np.ones(SHAPE)
        store.pushpull("weight", gradient)
        show("a weight of 10 after a gradient of 1 from every worker and a rate of 0.1", gradient)

        store.barrier()
        print(f"worker {rank} of {num_workers} is done", flush=True)


if __name__ == "__main__":
    main()
