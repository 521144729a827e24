"""Local training of NumPy's parameters on thread ranks, against a plain loop over the workers.

All numbers are multiples of powers of two with few digits, and there are 1, 2 or 4 workers, so that nothing is rounded:
the results have the same bits in whatever order they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from on_workers import on
from store_modes import HYBRID, ONE_HOST, SERVED, Mode

import mpikv
from mpikv import Parameter, Trainer, kv
from mpikv.errors import StatesFileError

STEPS = 12
SHAPES = {"first": (4, 3), "second": (7,), "third": (2, 2), "number": ()}
ALONE, FOUR, BY_MESSAGES = Mode("local", 1), Mode("dist_sync", 4, hosts="aabb"), Mode("dist_sync", 2, memory="off")
EVERYWHERE = (ALONE, ONE_HOST, BY_MESSAGES, FOUR, SERVED, Mode("dist_sync", 4, 2), HYBRID[1]._replace(workers=2))
NESTEROV = {"type": "nesterov", "learning_rate": 0.5, "momentum": 0.5}
SLOWMO = {"type": "slowmo", "learning_rate": 0.5, "momentum": 0.5}

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


OUTER: dict[str, tuple[Any, Callable[..., np.ndarray]]] = {
    "mean": ("mean", mean),
    "nesterov": (NESTEROV, nesterov),
    "slowmo": (SLOWMO, slowmo),
}


def reference(workers: int, outer: Callable[..., np.ndarray], every: int, steps: int = STEPS) -> list[Weights]:
    common = first_weights(0)
    momentum = {name: np.zeros_like(w) for name, w in common.items()}
    own = [first_weights(0) for _ in range(workers)]
    for step in range(steps):
        for worker, weights in enumerate(own):
            for name, gradient in gradients(step, worker).items():
                weights[name] = weights[name] - 0.5 * gradient
        if (step + 1) % every == 0:
            for name in SHAPES:
                moved = sum(common[name] - weights[name] for weights in own) / workers
                common[name] = outer(common[name], moved, momentum[name])
                for weights in own:
                    weights[name] = common[name]
    return own


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


@pytest.mark.parametrize("name", OUTER)
@on(*EVERYWHERE)
def test_workers_train_alone_and_meet_in_the_outer_optimizers_weights(mode, name):
    outer, formula = OUTER[name]

    def body(store: Any) -> Weights:
        worker = Worker(store, every=3, outer=outer)
        assert worker.train() == [False, False, True] * (STEPS // 3)
        assert (worker.local.steps, worker.local.rounds) == (STEPS, STEPS // 3)
        return worker.weights()

    assert_same(mode.run(body), reference(mode.workers, formula, 3))


@on(ALONE, ONE_HOST, SERVED)
@pytest.mark.parametrize("at", [6, 7], ids=["at a round's end", "in the middle of a round"])
def test_a_run_that_is_resumed_goes_on_exactly(mode, at, tmp_path):
    """With the states of the worker's own Adam, which are as far as its steps."""

    def body(store: Any, first: int, last: int) -> Weights:
        worker = Worker(store, "adam", every=3, outer=NESTEROV)
        assert worker.local.resume(tmp_path / "saved") == first // 3
        assert (worker.local.steps, worker.trainer.steps) == (first, first)
        worker.train(first, last)
        worker.local.save(tmp_path / f"saved{'' if last < STEPS else ' at the end'}")
        return worker.weights()

    whole = mode.run(
        lambda store: (worker := Worker(store, "adam", every=3, outer=NESTEROV)).train() and worker.weights()
    )
    mode.run(lambda store: body(store, 0, at))
    assert_same(mode.run(lambda store: body(store, at, STEPS)), whole)


def test_a_file_of_another_optimizer_is_refused(tmp_path):
    with kv.create("local") as store:
        worker = Worker(store, "adam", every=3)
        worker.train(0, 1)
        worker.local.save(tmp_path / "saved")
        with pytest.raises(StatesFileError):
            Worker(kv.create("local"), "sgd", every=3).local.resume(tmp_path / "saved")


@on(ONE_HOST)
def test_parameters_come_in_all_forms_and_common_has_the_weights_of_the_last_round(store, W):
    forms: list[Callable[[Mapping[str, Parameter]], Any]] = [dict, lambda ps: iter(ps.items()), lambda ps: ps.values()]
    for form in forms:
        params = {name: Parameter(value, name) for name, value in first_weights(store.rank).items()}
        local = mpikv.LocalUpdates(form(params), store, every=2)
        for parameter in params.values():
            np.subtract(parameter.data, 1 + store.rank, out=parameter.data)
        local.step()
        for name, value in first_weights(0).items():
            assert np.array_equal(local.common[name].data, value)
        local.step()
        for name, value in first_weights(0).items():
            assert np.array_equal(local.common[name].data, value - 1.5)
            assert np.array_equal(params[name].data, value - 1.5)
    assert W == 2


@on(ONE_HOST)
def test_row_sparse_parameters_are_exchanged_whole_and_frozen_ones_not_at_all(store):
    table = Parameter(np.zeros((4, 2)) + store.rank, "table", sparse=True)
    frozen = Parameter(np.zeros(3) + store.rank, "frozen", grad_req="null")
    local = mpikv.LocalUpdates([table, frozen], store, every=1)
    assert not table.data.any()
    assert not frozen.data.any()
    table.data[2 * store.rank] += 4.0
    frozen.data[...] += 1.0 + store.rank
    local.step()
    assert table.data[:, 0].tolist() == [2, 0, 2, 0]
    assert frozen.data.tolist() == [1.0 + store.rank] * 3
    assert list(local.common) == ["table"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"every": 2, "optimizer": "sgd"}, TypeError, "optimizer is a torch.optim.Optimizer or None, or a Trainer"),
        ({"every": 2, "params": np.zeros(2)}, TypeError, "params is a torch.nn.Module, a dict or a list"),
        ({"every": 2, "params": [Parameter(np.zeros(2), devices=["cpu", "cpu"])]}, ValueError, "on several devices"),
        ({"every": 2, "store": "local"}, TypeError, "store is a store, as kv.create makes one"),
    ],
)
def test_wrong_arguments_are_named(options, error, text):
    with kv.create("local") as store, pytest.raises(error, match=text):
        mpikv.LocalUpdates(**{"params": [Parameter(np.zeros(2))], "store": store, **options})


def test_a_workers_own_trainer_has_no_store():
    params = {"weight": Parameter(np.zeros(2))}
    with kv.create("local") as store, pytest.raises(ValueError, match="a Trainer with kvstore=None"):
        mpikv.LocalUpdates(params, store, every=1, optimizer=Trainer(params, "sgd", kvstore=store))
