"""Training a small PyTorch network with a Trainer on thread ranks, and alone with torch.optim, for comparison."""

from __future__ import annotations

import copy
from typing import Any

import frameworks
import numpy as np
from on_workers import taken_of
from store_modes import Mode, modes

from mpikv import KVStore, Trainer

torch = frameworks.need("torch")
from torch import nn  # noqa: E402

STEPS = 8
BATCH = 4  # of each worker


def perceptron() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3))


NET = perceptron()  # copied by each worker: the generator of random numbers is common to all threads


def network(rank: int) -> Any:
    """The same layers on every worker, with other weights: worker 0's must arrive."""
    net = copy.deepcopy(NET)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(rank)
    return net


def batch(step: int, worker: int, n: int = BATCH) -> tuple[Any, Any]:
    random = np.random.default_rng([step, worker])
    x, y = random.standard_normal((n, 6)), random.integers(0, 3, n)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def joined(step: int, sizes: dict[int, int]) -> tuple[Any, Any]:
    parts = [batch(step, worker, n) for worker, n in sizes.items()]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def loss(net: Any, data: tuple[Any, Any], reduction: str = "mean") -> Any:
    return nn.functional.cross_entropy(net(data[0]), data[1], reduction=reduction)


def weights(net: Any) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in net.parameters()]


def train(net: Any, trainer: Any, worker: int = 0, steps: Any = range(STEPS)) -> list[np.ndarray]:
    """The weights after steps with a worker's batches. trainer: a Trainer, or an optimizer."""
    for step in steps:
        trainer.zero_grad()
        loss(net, batch(step, worker)).backward()
        trainer.step()
    return weights(net)


def reference(
    sizes: Any, *, optimizer: Any = None, clip: float | None = None, options: Any = lambda step: {}
) -> list[np.ndarray]:
    """torch.optim alone. sizes: of each step, worker -> number of examples. options: of the optimizer, by step."""
    net = copy.deepcopy(NET)
    made = optimizer(net.parameters()) if optimizer else torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step, parts in enumerate(sizes):
        made.zero_grad()
        loss(net, joined(step, parts)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        made.param_groups[0].update(options(step))
        made.step()
    return weights(net)


def even(workers: int, steps: int = STEPS) -> list[dict[int, int]]:
    return [dict.fromkeys(range(workers), BATCH) for _ in range(steps)]


def assert_close(found: list[list[np.ndarray]], right: list[np.ndarray]) -> None:
    """All workers have the same bits, which are right but for rounding."""
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(found[0], right, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def as_alone(*several: Mode, sizes: Any = even, **options: Any) -> Any:
    """The weights that the test returns on each worker are those of `reference`, in each of these modes."""

    def run(body: Any, given: dict[str, Any]) -> None:
        mode = given["mode"]
        assert_close(mode.run(body), reference(sizes(mode.workers), **options))

    return lambda test: modes(*several)(taken_of(test, run, "mode"))


def sgd(net: Any, store: KVStore | None, **options: Any) -> Trainer:
    return Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store, **options)
