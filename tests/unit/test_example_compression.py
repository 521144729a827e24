"""examples/compressed.py: momentum that workers keep is that of the optimizer, and which codecs get it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpikv import optimizers

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import compressed


def options(*line: str, optimizer: str = "sgd") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compressed.add_options(parser)
    found = parser.parse_args(line)
    found.batch_size, found.optimizer = 64, optimizer
    found.compression = compressed.compression_params(parser, found)
    return found


def test_velocities_of_workers_are_the_momentum_of_the_sum() -> None:
    """Exactly, in numbers that float32 holds: two workers, and a last step of an epoch with half as many images."""
    images, half, rate = 4, 2, 0.5
    plain = optimizers.create("sgd", learning_rate=rate, momentum=0.5)
    late = optimizers.create("sgd", learning_rate=rate)
    expected, weight = np.zeros(3, np.float32), np.zeros(3, np.float32)
    plain_state, late_state = plain.init(expected), late.init(weight)
    workers = [compressed.WorkerMomentum(0.5) for _ in range(2)]
    for step, together in enumerate((images, images, half, images)):
        gradients = [np.array([step + 1, -2.0 * rank, 4], np.float32) * (together / images) for rank in range(2)]
        total = np.sum(gradients, axis=0)
        for momentum, gradient in zip(workers, gradients, strict=True):
            momentum.apply("w", gradient, together / images)
        plain.rescale_grad = late.rescale_grad = 1 / together
        plain_state = plain.update("w", expected, total, plain_state)
        late_state = late.update("w", weight, np.sum(gradients, axis=0), late_state)
        assert np.array_equal(weight, expected)
    assert expected.all()


def test_each_gradient_has_a_velocity_of_its_own() -> None:
    momentum = compressed.WorkerMomentum(0.5)
    for expected in (1.0, 1.5, 1.75):
        for name in (("w", 0), ("w", 1)):
            gradient = np.ones(2, np.float32)
            momentum.apply(name, gradient)
            assert gradient.tolist() == [expected] * 2


@pytest.mark.parametrize(
    ("line", "optimizer", "moves"),
    [
        (["--gc-type", "topk"], "sgd", True),
        (["--gc-type", "2bit"], "sgd", True),
        (["--gc-type", '{"type": "randomk", "ratio": 0.1}'], "sgd", False),
        (["--gc-type", '{"type": "topk", "ratio": 0.1}'], "sgd", True),
        (["--gc-type", "topk", "--gc-momentum", "store"], "sgd", False),
        (["--gc-type", "topk"], "adam", False),
        (["--gc-type", "int8"], "sgd", False),
        (["--gc-type", "int8", "--gc-momentum", "worker"], "sgd", True),
        (["--gc-momentum", "worker"], "sgd", True),
        ([], "sgd", False),
    ],
    ids=str,
)
def test_which_runs_keep_momentum_on_the_workers(line: list[str], optimizer: str, moves: bool) -> None:
    params = {"learning_rate": 0.05, "momentum": 0.75, "wd": 0.5}
    found = compressed.worker_momentum(options(*line, optimizer=optimizer), params)
    assert (found is not None) == moves
    assert params == {"learning_rate": 0.05, "momentum": 0.0, "wd": 2.0} if moves else params["momentum"] == 0.75
    assert compressed.worker_momentum(options(*line), {"learning_rate": 0.05, "momentum": 0.0, "wd": 0.5}) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([], None),
        (["--gc-type", "2bit"], {"type": "2bit", "threshold": 32}),
        (["--gc-type", "2bit", "--gc-threshold", "8"], {"type": "2bit", "threshold": 8}),
        (["--gc-type", '{"type": "2bit", "threshold": 4}'], {"type": "2bit", "threshold": 4}),
        (["--gc-type", "1bit"], {"type": "1bit"}),
        (["--gc-type", "topk"], {"type": "topk", "whole_elems": 1000}),
        (["--gc-type", '{"type": "topk", "whole_elems": 0}'], {"type": "topk", "whole_elems": 0}),
        (["--gc-type", "int8", "--gc-force"], {"type": "int8", "force": True}),
    ],
    ids=str,
)
def test_what_is_asked_of_the_store(line: list[str], expected: dict[str, Any] | None) -> None:
    assert options(*line).compression == expected


def test_other_optimizers_have_the_stores_threshold() -> None:
    """Adam makes steps of a length of its own: with 32 it was far behind."""
    assert options("--gc-type", "2bit", optimizer="adam").compression == {"type": "2bit"}


def test_momentum_of_workers_is_for_sgd(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--gc-momentum", "worker", optimizer="adam")
    assert "--gc-momentum worker is for --optimizer sgd, not adam" in capsys.readouterr().err
