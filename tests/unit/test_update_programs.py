"""When the trace of an update's formula is used again: only where the same formula would note the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpikv import Config, optimizers
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.step import Step
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.update_programs import UpdatePrograms
from mpikv.testing.fake_gpu import FakeGpu, FakeGpus
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

N = 37


class Weights:
    """Some keys with an optimizer on a fake GPU, and the same on the host."""

    def __init__(self, optimizer: Optimizer, keys: int = 1, dtype: Any = np.float32) -> None:
        self.optimizer, self.space = optimizer, DeviceSpace(FakeGpu())
        self.on_host = [np.random.default_rng(i).standard_normal(N).astype(dtype) for i in range(keys)]
        self.on_gpu = [self.space.from_host(weight.copy()) for weight in self.on_host]
        self.states = [[optimizer.init(weight) for weight in weights] for weights in (self.on_host, self.on_gpu)]
        self.rounds = 0

    def update(self) -> int:
        """One of each key. Returns how many traces it took."""
        before, self.rounds = self.space.programs.traces, self.rounds + 1
        for i, (host, gpu) in enumerate(zip(self.on_host, self.on_gpu, strict=True)):
            grad = np.random.default_rng([i, self.rounds]).standard_normal(N).astype(np.float32)
            self.optimizer.update(i, host, grad, self.states[0][i])
            self.optimizer.update(i, gpu, self.space.from_host(grad), self.states[1][i])
        for host, gpu in zip(self.on_host, self.on_gpu, strict=True):
            assert self.space.to_host(gpu).tobytes() == host.tobytes()
        return self.space.programs.traces - before


ELEMENTWISE = sorted(
    name for name in optimizers.names() if optimizers.create(name).elementwise and name not in ("function", "torch")
)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_keys_with_equal_numbers_have_one_trace(name: str) -> None:
    """With the bits of the host, which runs the formula for each."""
    weights = Weights(optimizers.create(name, learning_rate=0.25, wd=0.01), keys=5)
    assert [weights.update() <= 1 for _ in range(3)] == [True] * 3
    assert weights.space.programs.traces >= 1


def test_what_counts_updates_is_traced_once_for_each_round() -> None:
    assert [Weights(optimizers.create("adam"), keys=5).update()] == [1]
    adam = Weights(optimizers.create("adam"), keys=5)
    assert [adam.update() for _ in range(3)] == [1, 1, 1]
    sgd = Weights(optimizers.create("sgd", momentum=0.9), keys=5)
    assert [sgd.update() for _ in range(3)] == [1, 0, 0]


def test_a_changed_attribute_is_traced_anew_and_the_old_one_is_not() -> None:
    sgd = Weights(optimizers.create("sgd", momentum=0.9), keys=4)
    found = [sgd.update()]
    for rate in (0.5, 0.25, 0.5):
        sgd.optimizer.set_learning_rate(rate)
        found.append(sgd.update())
    assert found == [1, 1, 1, 0]
    sgd.optimizer.clip_gradient = 0.1
    assert sgd.update() == 1


def test_keys_with_factors_of_their_own() -> None:
    sgd = Weights(optimizers.create("sgd", wd=0.1), keys=6)
    sgd.optimizer.set_lr_mult({1: 0.5, 3: 0.5, 4: 0.0})
    sgd.optimizer.set_wd_mult({0: 0.0})
    assert [sgd.update() for _ in range(3)] == [4, 0, 0]  # 0; 1 and 3; 4; 2 and 5


def test_zeros_of_both_signs_are_different_numbers() -> None:
    sgd = Weights(optimizers.create("sgd", momentum=0.5))
    sgd.update()
    object.__setattr__(sgd.optimizer, "momentum", 0.0)
    assert sgd.update() == 1
    object.__setattr__(sgd.optimizer, "momentum", -0.0)
    assert sgd.update() == 1


class Own(optimizers.Optimizer):
    """What it looks at is what a test says."""

    looks_at: Any = staticmethod(lambda step: 1.0)
    table: Any = None

    def formula(self, step: Step, w: Any, g: Any, arrays: Any, tmp: Any) -> None:
        w -= np.multiply(g, step.real(self.looks_at(step)), out=tmp[0])


@pytest.mark.parametrize(
    ("looks_at", "traces"),
    [
        (lambda step: 0.5, [1, 0]),
        (lambda step: step.learning_rate, [1, 0]),
        (lambda step: step.key + 1.0, [4, 0]),
        (lambda step: step.t / 2, [1, 1]),
        (lambda step: step.shape[0], [1, 0]),
        (lambda step: step.state["t"] + 1.0, [4, 4]),  # may be anything, and may be changed
        (lambda step: step[1] / 2, [4, 4]),  # as a tuple: all of it
        (lambda step: step._replace(wd=0.5).wd, [4, 4]),
        (lambda step: [*step][1], [4, 4]),
    ],
)
def test_what_a_formula_looks_at(looks_at: Any, traces: list[int]) -> None:
    class Looking(Own):
        pass

    Looking.looks_at = staticmethod(looks_at)
    weights = Weights(Looking(), keys=4)
    assert [weights.update() for _ in range(2)] == traces


def test_attributes_that_cannot_be_compared() -> None:
    """What an array holds may be changed in place."""
    own = Weights(Own(), keys=3)
    own.optimizer.table = np.ones(3)
    assert [own.update() for _ in range(2)] == [3, 3]


def test_few_are_kept() -> None:
    sgd = Weights(optimizers.create("sgd"))
    for i in range(UpdatePrograms.MOST + 5):
        sgd.optimizer.set_learning_rate(1 / (i + 1))
        sgd.update()
    assert len(sgd.space.programs._kept) <= UpdatePrograms.MOST


def test_a_bucket_of_100_keys_has_one_trace_in_a_round() -> None:
    gpus = [gpu.view(rank) for rank, gpu in enumerate(FakeGpus(2))]
    names = list(range(100))

    def body(store: Any) -> list[int]:
        gpu, found = gpus[store.rank], []
        store.init(names, [gpu.array(np.ones(8, np.float32)) for _ in names])
        store.set_optimizer(optimizers.create("adam"))
        store.strategy.bucket(names)
        for step in range(3):
            before = store.session.spaces.device.programs.traces
            store.push(names, [gpu.array(np.full(8, step + 1.0, np.float32)) for _ in names])
            store.pull(names, [gpu.array(np.empty(8, np.float32)) for _ in names])
            found.append(store.session.spaces.device.programs.traces - before)
        return found

    config = Config(timeout_s=TEST_TIMEOUT_S, device_path="staged")
    for found in spawn_stores("dist_sync", 2, body, drivers=gpus, config=config, hosts=["a", "b"]):
        assert found == [1, 1, 1]
