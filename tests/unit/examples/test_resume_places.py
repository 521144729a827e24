"""examples/train_mnist.py resumed in the middle of an epoch, with any number of workers, on thread ranks."""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import networks
import train_mnist
from image_files import Images

from mpikv import Trainer
from mpikv.testing.stores import spawn_stores

EXAMPLES, EPOCHS = 50, 2


def options(workers: int, together: int, max_steps: int | None) -> argparse.Namespace:
    return argparse.Namespace(
        **{"kv_store": "dist_sync", "optimizer": "sgd", "lr": 0.02, "mom": 0.9, "wd": 0.0, "seed": 3, "save": None},
        **{"devices": ["cpu"], "warmup_epochs": 1.5, "lr_factor": 0.5, "lr_step_epochs": [1], "num_epochs": EPOCHS},
        **{"batch_size": together // workers, "max_steps": max_steps},
    )


def images() -> Images:
    random = np.random.default_rng(1)
    x = random.integers(0, 256, (EXAMPLES + 6, 1, 28, 28)).astype(np.uint8)
    y = random.integers(0, 10, EXAMPLES + 6)
    return Images(x[:EXAMPLES], y[:EXAMPLES], x[EXAMPLES:], y[EXAMPLES:], "random")


class Run(train_mnist.Run):
    """Writes down every step: its examples on this worker, and its learning rate."""

    seen: list[tuple[list[int], float]]

    def gradients(self, indices: np.ndarray, together: int) -> float:
        self.seen.append((indices.tolist(), self.trainer.learning_rate))
        return super().gradients(indices, together)


def run(workers: int, together: int, file: Path, max_steps: int | None = None) -> tuple[Any, dict[str, bytes]]:
    """Train from what is in the file, if there is one. Each step's examples of all workers with its rate; weights."""

    def body(store: Any) -> Any:
        network = networks.NETWORKS["mlp"](["cpu"], 0, np.float64)
        store.init("correct", np.zeros(1, dtype=np.int64))
        trainer = Trainer(network.parameters, "sgd", {"momentum": 0.9, "learning_rate": 0.02}, kvstore=store)
        trainer.resume(file)
        training = Run(options(workers, together, max_steps), store, images(), network, trainer)
        training.seen = []
        training.train()
        trainer.save(file)
        return training.seen, {name: p.data.copy() for name, p in network.parameters.items()}

    found = spawn_stores("dist_sync", workers, body)
    steps = list(zip(*(seen for seen, _ in found), strict=True))
    for step in steps:
        assert len({rate for _, rate in step}) == 1
    return [(sorted(chain(*(mine for mine, _ in step))), step[0][1]) for step in steps], found[0][1]


@pytest.mark.parametrize(("workers", "stop"), [(2, 5), (4, 3)])
def test_another_number_of_workers(workers: int, stop: int, tmp_path: Path) -> None:
    """The same global batches, made of the same examples, at the same rates, on the way to the same weights."""
    whole, wanted = run(3, 12, tmp_path / "whole")
    assert len(whole) == EPOCHS * 5  # the last step of an epoch has 2 examples
    begun, _ = run(3, 12, tmp_path / "file", max_steps=stop)
    rest, weights = run(workers, 12, tmp_path / "file")
    assert begun + rest == whole
    assert run(workers, 12, tmp_path / "file")[0] == []  # nothing is left
    for name, weight in wanted.items():
        np.testing.assert_allclose(weights[name], weight, rtol=1e-9, atol=1e-12)
