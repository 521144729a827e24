"""mpikv.jax with optax: the workers' weights are those of one process with the joined batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import frameworks
import numpy as np
import pytest
from store_modes import Mode

jax = frameworks.need("jax")
optax = frameworks.need("optax")

import jax.numpy as jnp  # noqa: E402

import mpikv.jax as mj  # noqa: E402

jax.config.update("jax_cpu_enable_async_dispatch", False)  # see test_jax.py

STEPS, EXAMPLES = 8, 6  # examples of one worker in a step
CHAINS = {
    "sgd": lambda: (optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
    "adam": lambda: (optax.adam(0.01),),
}


def first_weights(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    sizes = (5, 7, 3)
    return [{"w": jnp.asarray(rng.normal(size=(m, n)), jnp.float32), "b": jnp.zeros(n)} for m, n in pairwise(sizes)]


def loss(weights: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ weights[0]["w"] + weights[0]["b"])
    return ((hidden @ weights[1]["w"] + weights[1]["b"] - y) ** 2).mean()


def train(rest: Any, weights: Any, batches: Any, store: Any = None, *, inside: bool = True) -> Any:
    """The final weights. inside: gradients are exchanged in the compiled step, not between two of them."""
    optimizer = optax.chain(*rest) if store is None or not inside else optax.chain(mj.allreduce_gradients(store), *rest)

    def update(weights: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    gradient, whole = jax.grad(loss), jax.jit(lambda w, s, x, y: update(w, s, jax.grad(loss)(w, x, y)))
    if not inside:
        gradient, update = jax.jit(gradient), jax.jit(update)
    state = optimizer.init(weights)
    for x, y in batches:
        if inside:
            weights, state = whole(weights, state, x, y)
        else:
            weights, state = update(weights, state, mj.allreduce(gradient(weights, x, y), store))
    return weights


@pytest.mark.parametrize(("name", "workers", "inside"), [("sgd", 2, True), ("adam", 3, False)])
def test_steps_are_those_of_one_process(name: str, workers: int, inside: bool) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(STEPS, workers * EXAMPLES, 5)), rng.normal(size=(STEPS, workers * EXAMPLES, 3))
    x, y = x.astype(np.float32), y.astype(np.float32)
    alone = train(CHAINS[name](), first_weights(0), zip(x, y, strict=True))

    def body(store: Any) -> Any:
        mine = slice(store.rank * EXAMPLES, (store.rank + 1) * EXAMPLES)
        batches = list(zip(x[:, mine], y[:, mine], strict=True))
        weights = mj.broadcast(first_weights(store.rank), store)
        return train(CHAINS[name](), weights, batches, store, inside=inside)

    found = Mode("dist_sync", workers).run(body)
    for weights in found:
        for mine, first, expected in zip(*map(jax.tree.leaves, (weights, found[0], alone)), strict=True):
            assert np.asarray(mine).tobytes() == np.asarray(first).tobytes()
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
