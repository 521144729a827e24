"""A worker for tests of mpikv.jax: `jax_program.py CASE`. One core for each process, as mpirun gives by default."""

from __future__ import annotations

import os
import sys

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax  # noqa: E402 - counts the cores
import jax.numpy as jnp  # noqa: E402

import mpikv.jax as mj  # noqa: E402
from mpikv import kv  # noqa: E402

N = 400


def main(case: str) -> None:
    with kv.create("dist_sync") as store:
        rank, workers = store.rank, store.num_workers
        assert "optax" not in sys.modules
        optimizer = mj.allreduce_gradients(store, "sum")

        @jax.jit
        def slow(x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, 5, lambda _, a: (a @ a) / N, x)

        @jax.jit
        def reduced(x: jax.Array) -> jax.Array:
            return optimizer.update({"x": x}, optimizer.init(None))[0]["x"]

        result = jnp.ones((N, N))
        for _ in range(4):  # each program begins while the one before is still running
            result = reduced(slow(result)) / workers
        if case == "waits":
            print(f"worker {rank}: {mj.allreduce(float(rank), store)}", flush=True)
        if case == "raise" and rank == 1:
            result = jnp.ones(3)
        result = reduced(slow(result) if case != "raise" else result)
        # The store waits for what is still running before it closes.
    print(f"worker {rank}: {float(result[0, 0])}", flush=True)


main(sys.argv[1])
