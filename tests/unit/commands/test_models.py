"""The networks' shapes: as many arrays and values as their authors' implementations have."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import networks

from mpikv.commands.models import shapes


@pytest.mark.parametrize(
    ("name", "arrays", "numbers"),
    [
        ("resnet18", 62, 11_689_512),  # torchvision.models.resnet18().parameters()
        ("resnet50", 161, 25_557_032),  # torchvision.models.resnet50().parameters()
        ("transformer12", 199, 109_482_240),  # transformers.BertModel(BertConfig()).parameters()
        ("lenet", 8, 431_080),
    ],
)
def test_counts(name: str, arrays: int, numbers: int) -> None:
    assert len(shapes(name)) == arrays
    assert sum(map(math.prod, shapes(name))) == numbers
    assert all(length > 0 for shape in shapes(name) for length in shape)


def test_lenet_is_that_of_the_examples() -> None:
    network = networks.NETWORKS["lenet"]()
    assert tuple(parameter.data.shape for parameter in network.parameters.values()) == shapes("lenet")
