"""examples/compressed.py: what workers keep is what the optimizer would, and which codecs make them do so."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpikv import optimizers

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

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


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_steps_of_workers_are_those_of_adam(library: str, dtype: str) -> None:
    """The store's optimizer, for one worker; a last step of an epoch with half as many images; two replicas."""
    arrays = pytest.importorskip(library)
    make = {"numpy": "array", "torch": "tensor"}[library]
    rate, replicas = 0.125, 2
    adam = optimizers.create("adam", learning_rate=rate)
    sgd = optimizers.create("sgd", learning_rate=rate, rescale_grad=64)
    expected, weight = np.zeros(3), np.zeros(3)
    adam_state, sgd_state = adam.init(expected), sgd.init(weight)
    worker = compressed.WorkerAdam(replicas)
    for step, share in enumerate((1.0, 1.0, 0.5, 1.0)):
        gradient = np.array([step + 1, -2.0, 64 * (step - 1)])  # of whole batches; each replica has the same
        adam_state = adam.update("w", expected, gradient, adam_state)
        total = np.zeros(3)
        for replica in range(replicas):
            pushed = getattr(arrays, make)(gradient * share, dtype=getattr(arrays, dtype))
            worker.apply(("w", replica), pushed, share)
            total += np.asarray(pushed)
        sgd.rescale_grad = 64 / (64 * share)
        sgd_state = sgd.update("w", weight, total, sgd_state)
        np.testing.assert_allclose(weight, expected, rtol=1e-3 if dtype == "float16" else 1e-6)
    assert expected.all()


@pytest.mark.parametrize(
    ("line", "optimizer", "moves"),
    [
        (["--gc-type", "topk"], "sgd", True),
        (["--gc-type", "2bit"], "sgd", True),
        (["--gc-type", "1bit"], "sgd", False),
        (["--gc-type", "topk", "--gc-momentum", "store"], "sgd", False),
        (["--gc-type", "int8"], "sgd", False),
        (["--gc-type", "int8", "--gc-momentum", "worker"], "sgd", True),
        (["--gc-momentum", "worker"], "sgd", True),
        ([], "sgd", False),
        (["--gc-type", "1bit"], "adam", True),
        (["--gc-type", "topk"], "adam", True),
        (["--gc-type", "topk", "--gc-momentum", "store"], "adam", False),
        (["--gc-type", "powersgd"], "adam", False),
        (["--gc-momentum", "worker"], "adam", True),
        ([], "adam", False),
        (["--gc-type", "topk"], "lamb", False),
    ],
    ids=str,
)
def test_which_runs_keep_the_optimizers_memory_on_the_workers(line: list[str], optimizer: str, moves: bool) -> None:
    given = {"learning_rate": 0.05, "momentum": 0.75, "wd": 0.5}
    if optimizer != "sgd":
        del given["momentum"]
    params = dict(given)
    of_store, memory = compressed.on_workers(options(*line, optimizer=optimizer), params, replicas=4)
    if not moves:
        assert (of_store, memory, params) == (optimizer, None, given)
        return
    assert of_store == "sgd"
    if optimizer == "sgd":
        assert isinstance(memory, compressed.WorkerMomentum)
        assert params == {"learning_rate": 0.05, "momentum": 0.0, "wd": 2.0}
    else:
        assert isinstance(memory, compressed.WorkerAdam)
        assert params == {"learning_rate": 0.05, "wd": 0.5, "rescale_grad": 64}


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
    for optimizer, threshold in (("adam", {"threshold": 1}), ("lamb", {})):  # Adam's steps are 1 at first
        assert options("--gc-type", "2bit", optimizer=optimizer).compression == {"type": "2bit", **threshold}


def test_workers_keep_the_memory_of_two_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--gc-momentum", "worker", optimizer="lamb")
    assert "--gc-momentum worker is for --optimizer sgd and adam, not lamb" in capsys.readouterr().err
