"""Workers with NumPy's parameters that train by themselves, and a plain loop over them for comparison.

All numbers are multiples of powers of two with few digits, and there are 1, 2 or 4 workers, so that nothing is rounded:
the results have the same bits in whatever order they are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from store_modes import HYBRID, ONE_HOST, SERVED, Mode

import mpikv
from mpikv import Parameter, Trainer, optimizers

STEPS = 12
SHAPES = {"first": (4, 3), "second": (7,), "third": (2, 2), "number": ()}
ALONE, FOUR, BY_MESSAGES = Mode("local", 1), Mode("dist_sync", 4, hosts="aabb"), Mode("dist_sync", 2, memory="off")
EVERYWHERE = (ALONE, ONE_HOST, BY_MESSAGES, FOUR, SERVED, Mode("dist_sync", 4, 2), HYBRID[1]._replace(workers=2))

Weights = dict[str, np.ndarray]


def first_weights(worker: int) -> Weights:
    return {name: np.asarray(np.arange(np.prod(shape) * 1.0).reshape(shape) + worker) for name, shape in SHAPES.items()}


def gradients(step: int, worker: int) -> Weights:
    random = np.random.default_rng([step, worker])
    return {name: random.integers(-8, 9, shape).astype(float) for name, shape in SHAPES.items()}


def mean(w: np.ndarray, moved: np.ndarray, _momentum: np.ndarray) -> np.ndarray:
    return w - moved


def nesterov(w: np.ndarray, moved: np.ndarray, momentum: np.ndarray) -> np.ndarray:
    momentum[...] = 0.5 * momentum + moved
    return w - 0.5 * (moved + 0.5 * momentum)


def slowmo(w: np.ndarray, moved: np.ndarray, momentum: np.ndarray) -> np.ndarray:
    momentum[...] = 0.5 * momentum + moved
    return w - 0.5 * momentum


NESTEROV = {"type": "nesterov", "learning_rate": 0.5, "momentum": 0.5}
OUTER: dict[str, tuple[Any, Callable[..., np.ndarray]]] = {
    "mean": ("mean", mean),
    "nesterov": (NESTEROV, nesterov),
    "slowmo": ({**NESTEROV, "type": "slowmo"}, slowmo),
    "an optimizer": (optimizers.SGD(learning_rate=0.5), lambda w, moved, _momentum: w - 0.5 * moved),
}
PARTS = {  # of parameters with 96, 56, 32 and 8 bytes
    1: [["first", "second", "third", "number"]],
    2: [["first"], ["second", "third", "number"]],
    3: [["first"], ["second"], ["third", "number"]],
}


class Reference:
    """All workers, one after another. own: their weights."""

    def __init__(self, workers: int, outer: Callable[..., np.ndarray], mixing: float | None) -> None:
        self.outer, self.mixing = outer, mixing
        self.common = first_weights(0)
        self.momentum = {name: np.zeros_like(w) for name, w in self.common.items()}
        self.own = [first_weights(0) for _ in range(workers)]
        self.begun: dict[str, tuple[int, list[np.ndarray]]] = {}  # by name at which step, and the workers' weights then

    def train(self, step: int) -> None:
        for worker, weights in enumerate(self.own):
            for name, gradient in gradients(step, worker).items():
                weights[name] = weights[name] - 0.5 * gradient

    def begin(self, name: str, step: int) -> None:
        then = [weights[name] for weights in self.own]
        moved = sum(self.common[name] - weight for weight in then) / len(then)
        self.common[name] = self.outer(self.common[name], moved, self.momentum[name])
        self.begun[name] = step, then

    def finish(self, until: int) -> None:
        for name, (step, then) in list(self.begun.items()):
            if step <= until:
                del self.begun[name]
                for weights, old in zip(self.own, then, strict=True):
                    if self.mixing is None:
                        weights[name] = self.common[name] + (weights[name] - old)
                    else:
                        weights[name] = self.mixing * weights[name] + (1 - self.mixing) * self.common[name]


def reference(
    workers: int,
    outer: Callable[..., np.ndarray],
    every: int,
    *,
    parts: int = 1,
    delay: int = 0,
    mixing: float | None = None,
    steps: int = STEPS,
) -> list[Weights]:
    found = Reference(workers, outer, mixing)
    for step in range(1, steps + 1):
        found.train(step - 1)
        found.finish(step - delay)
        for part, names in enumerate(PARTS[parts], 1):
            if (step - part * every // parts) % every == 0:
                for name in names:
                    found.begin(name, step)
        found.finish(step - delay)
    return found.own


class Worker:
    """A worker's parameters, its trainer and its local training."""

    def __init__(self, store: Any, optimizer: str = "sgd", **options: Any) -> None:
        self.rank = store.rank
        self.params = {name: Parameter(value) for name, value in first_weights(self.rank).items()}
        self.trainer = Trainer(self.params, optimizer, {"learning_rate": 0.5}, kvstore=None)
        self.local = mpikv.LocalUpdates(self.params, store, optimizer=self.trainer, **options)

    def train(self, first: int = 0, last: int = STEPS) -> list[bool]:
        ended = []
        for step in range(first, last):
            for name, gradient in gradients(step, self.rank).items():
                self.params[name].grad[...] = gradient
            self.trainer.step()
            ended.append(self.local.step())
        return ended

    def weights(self) -> Weights:
        return {name: parameter.data.copy() for name, parameter in self.params.items()}


def assert_same(found: list[Weights], expected: list[Weights]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)
