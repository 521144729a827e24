"""The networks of the examples: every layer against plain loops, gradients against differences, in float64."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import networks

random = np.random.Generator(np.random.PCG64(5))


def naive_conv_pool(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Convolution, bias, then the maximum of 2x2; x: (channels, rows, columns, images)."""
    filters, channels, k, _ = weight.shape
    rows, columns, images = x.shape[1] - k + 1, x.shape[2] - k + 1, x.shape[3]
    conv = np.zeros((filters, rows, columns, images))
    for f, r, c, n in np.ndindex(conv.shape):
        for ch, i, j in product(range(channels), range(k), range(k)):
            conv[f, r, c, n] += weight[f, ch, i, j] * x[ch, r + i, c + j, n]
        conv[f, r, c, n] += bias[f]
    pooled = np.zeros((filters, rows // 2, columns // 2, images))
    for f, r, c, n in np.ndindex(pooled.shape):
        pooled[f, r, c, n] = conv[f, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2, n].max()
    return pooled


def bound(layer: Any) -> Any:
    data = [random.standard_normal(shape) for shape in layer.shapes]
    layer.bind(data)
    layer.bind_grad([np.full(shape, np.nan) for shape in layer.shapes])
    return layer


@pytest.mark.parametrize(("size", "k", "images"), [((8, 8), 3, 3), ((7, 9), 3, 2), ((6, 5), 2, 1), ((5, 5), 1, 0)])
def test_conv_pool_against_loops(size: tuple[int, int], k: int, images: int) -> None:
    layer = bound(networks.ConvPool(2, 3, k))
    x = random.standard_normal((2, *size, images))
    np.testing.assert_allclose(layer.forward(x), naive_conv_pool(x, layer.weight, layer.bias), rtol=1e-12, atol=1e-12)


def difference(f: Any, array: np.ndarray, at: tuple[int, ...], step: float = 1e-6) -> float:
    kept = array[at]
    array[at] = kept + step
    above = f()
    array[at] = kept - step
    below = f()
    array[at] = kept
    return (above - below) / (2 * step)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (networks.Dense(6, 4), (6, 5)),
        (networks.Dense(12, 3), (3, 2, 2, 4)),
        (networks.ConvPool(2, 3, 3), (2, 6, 6, 2)),
        (networks.ConvPool(1, 2, 2), (1, 6, 4, 2)),
        (networks.Tanh(), (3, 4)),
        (networks.Relu(), (3, 4)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, networks.Layer) else None,
)
def test_backward_of_a_layer(layer: Any, shape: tuple[int, ...]) -> None:
    """Every element of every gradient, against the central difference of sum(y * dy)."""
    if layer.names:
        bound(layer)
    x = random.standard_normal(shape)
    dy = random.standard_normal(layer.forward(x).shape)
    dx = layer.backward(dy, True).copy()
    pairs = [(x, dx)]
    if layer.names:
        pairs += [(layer.weight, layer.d_weight.copy()), (layer.bias, layer.d_bias.copy())]
    for array, gradient in pairs:
        for at in np.ndindex(array.shape):
            expected = difference(lambda: float((layer.forward(x) * dy).sum()), array, at)
            assert gradient[at] == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_equal_maxima_give_the_gradient_to_the_first() -> None:
    """A black border makes many equal maxima: their gradient must come once, not four times."""
    layer = bound(networks.ConvPool(1, 1, 1))
    layer.weight[:] = 1
    x = np.array([[1.0, 1, 5, 0], [1, 1, 5, 5], [0, 0, 2, 3], [7, 7, 3, 3]])[None, :, :, None]
    layer.forward(x)
    dx = layer.backward(np.arange(1.0, 5).reshape(1, 2, 2, 1), True)
    assert dx[0, :, :, 0].tolist() == [[1, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 4], [3, 0, 0, 0]]


def test_softmax_cross_entropy() -> None:
    logits = random.standard_normal((4, 5))
    labels = np.array([0, 3, 1, 1, 2])
    loss, gradient = networks.softmax_cross_entropy(logits, labels)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=0)
    assert loss == pytest.approx(-sum(np.log(probabilities[label, n]) for n, label in enumerate(labels)), rel=1e-12)
    for at in np.ndindex(logits.shape):
        expected = difference(lambda: float(networks.softmax_cross_entropy(logits, labels)[0]), logits, at)
        assert gradient[at] == pytest.approx(expected, rel=1e-6, abs=1e-8)
    loss, gradient = networks.softmax_cross_entropy(np.array([[1000.0], [0.0]]), np.array([1]))
    assert loss == 1000
    assert gradient[:, 0].tolist() == [1, -1]


def images(n: int) -> tuple[np.ndarray, np.ndarray]:
    return random.integers(0, 256, (n, 1, 28, 28)).astype(np.uint8), random.integers(0, 10, n)


def test_gradients_are_sums_over_images() -> None:
    """So that the gradients of slices of a batch, on devices or workers, add up to that of the batch."""
    network = networks.NETWORKS["lenet"](devices=["cpu:0", "cpu:1"], seed=3, dtype=np.float64)
    x, labels = images(5)
    loss = network.loss_and_gradients(x, labels, 1)
    whole = {name: p.list_grad()[1].copy() for name, p in network.parameters.items()}
    assert all((p.list_grad()[0] == 0).all() for p in network.parameters.values())
    parts = network.loss_and_gradients(x[:3], labels[:3], 0) + network.loss_and_gradients(x[3:], labels[3:], 1)
    assert loss == pytest.approx(parts, rel=1e-12)
    for name, parameter in network.parameters.items():
        np.testing.assert_allclose(sum(parameter.list_grad()), whole[name], rtol=1e-9, atol=1e-12)
    assert network.loss_and_gradients(x[:0], labels[:0], 0) == 0
    assert all((p.list_grad()[0] == 0).all() for p in network.parameters.values())
