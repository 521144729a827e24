"""A linear model with JAX and optax on any number of workers: mpikv launch -n 2 -s 0 python examples/jax_linear.py"""

import jax
import jax.numpy as jnp
import optax

import mpikv.jax as mj
from mpikv import kv

with kv.create("dist_sync") as store:
    x = jax.random.normal(jax.random.key(store.rank), (64, 2))  # each worker has data of its own
    y = x @ jnp.array([2.0, -3.0])
    weights = mj.broadcast(jnp.zeros(2), store)  # all begin with worker 0's
    optimizer = optax.chain(mj.allreduce_gradients(store), optax.adam(0.1))
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state):
        gradient = jax.grad(lambda w: ((x @ w - y) ** 2).mean())(weights)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, updates), state

    for _ in range(200):
        weights, state = step(weights, state)
    if store.rank == 0:
        print(weights.round(2) + 0)
