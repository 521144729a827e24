"""The networks of `mpikv bench train`."""

from __future__ import annotations

import frameworks
import pytest

from mpikv.commands.bench.options import TRAINED
from mpikv.commands.models import shapes

torch = frameworks.need("torch")

from mpikv.commands.bench import torch_models  # noqa: E402


@pytest.mark.parametrize("name", ["resnet18", "lenet"])
def test_parameters_have_the_shapes_that_models_lists(name: str) -> None:
    """In the order of the forward pass, but that a block's way around is made after its convolutions."""
    net = torch_models.make(name, TRAINED[name], seed=0)
    assert [tuple(parameter.shape) for parameter in net.parameters()] == list(shapes(name))


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_gives_every_parameter_a_gradient(name: str) -> None:
    pixels = 32 if name == "resnet18" else TRAINED[name]
    net = torch_models.make(name, pixels, seed=0)
    images, labels = torch_models.batch(name, pixels, 3, seed=1)
    torch.nn.functional.cross_entropy(net(images), labels).backward()
    assert all(float(parameter.grad.abs().sum()) > 0 for parameter in net.parameters())


def test_the_same_seed_gives_the_same_numbers() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (torch_models.make("lenet", 28, seed) for seed in (0, 0, 1))
    for a, b, c in zip(one.parameters(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert torch.equal(torch_models.batch("lenet", 28, 2, 3)[0], torch_models.batch("lenet", 28, 2, 3)[0])
    assert torch.equal(torch.get_rng_state(), before)  # the caller's numbers are as they were
