"""Train a perceptron on Fashion-MNIST with JAX: mpikv launch -n 4 -s 0 python examples/jax_mnist.py"""

import time
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from image_files import load_images
from usage import Parser

import mpikv.jax as mj
from mpikv import kv
from mpikv.common.progress import shown
from mpikv.data import SplitSampler


def logits(weights, images):
    x = images.reshape(len(images), -1) / 255.0
    for w, b in weights[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ weights[-1][0] + weights[-1][1]


def loss(weights, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits(weights, images), labels).mean()


parser = Parser(__doc__)
parser.add_argument("--data-dir", help="directory with the four IDX files; without it as examples/train_mnist.py")
parser.add_argument("--epochs", type=int, default=3, help="(3)")
parser.add_argument("--batch-size", type=int, default=64, help="examples of one worker in a step (64)")
options = parser.parse_args()

with kv.create("dist_sync") as store:
    images = load_images(options.data_dir)  # every worker takes its part of each epoch
    rng, sizes = np.random.default_rng(store.rank), (784, 256, 10)
    weights = [(rng.normal(0, m**-0.5, (m, n)).astype(np.float32), np.zeros(n, np.float32)) for m, n in pairwise(sizes)]
    weights = mj.broadcast(weights, store)  # all begin with worker 0's
    optimizer = optax.chain(mj.allreduce_gradients(store), optax.adam(1e-3))  # Adam sees their mean
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state, x, y):
        updates, state = optimizer.update(jax.grad(loss)(weights, x, y), state)
        return optax.apply_updates(weights, updates), state

    start_s = time.perf_counter()
    sampler = SplitSampler.for_store(len(images.train_x), store)  # equally many examples for each worker
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        mine = sampler.indices()
        batches = np.reshape(mine[: len(mine) // options.batch_size * options.batch_size], (-1, options.batch_size))
        for batch in shown(batches, f"epoch {epoch + 1}", here=store.rank == 0):
            weights, state = step(weights, state, images.train_x[batch], images.train_y[batch])
        accuracy = jnp.mean(logits(weights, images.test_x).argmax(1) == images.test_y)
        if store.rank == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.4f}, {time.perf_counter() - start_s:.1f} s", flush=True)
