"""LeNet and a multi-layer perceptron, forward and backward, with NumPy or CuPy alone.

Activations have their axes in the order (channels, rows, columns, images): the images are last. So every slice that a
convolution or a pooling takes is a copy of long contiguous runs, and a convolution of the whole batch is one matrix
product,

    (filters, channels*k*k) @ (channels*k*k, rows*columns*images),

whose result already has the order that the next layer wants. With the images first, as they come from the file, the
same LeNet takes several times as long for those copies. Biases are added, and tanh or relu applied, after the
pooling: both are monotonic, so the maximum is the same, and there are four times fewer numbers.

LeNet is MXNet's (example/image-classification/symbols/lenet.py): 20 and 50 filters of 5x5, tanh, pooling 2x2, 500
hidden units; the perceptron is its mlp.py. Initial weights: uniform in +-sqrt(6 / (fan in + fan out)), X. Glorot
and Y. Bengio, AISTATS 2010; biases 0.

A network's gradients are sums over the images of the batch: `Trainer.step` divides by their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpikv import Parameter

Array = Any  # of NumPy or of CuPy


def array_module(x: Array) -> Any:
    """The module that made `x`: numpy or cupy."""
    if isinstance(x, np.ndarray):
        return np
    import cupy  # noqa: PLC0415 - there is an array of it

    return cupy.get_array_module(x)


class Layer:
    """One step of a network, with its own memory of the last forward pass that `backward` needs."""

    names: tuple[str, ...] = ()  # of its parameters

    def bind(self, data: Sequence[Array]) -> None:
        """Use these weights."""
        self.weight, self.bias = data or (None, None)

    def bind_grad(self, grad: Sequence[Array]) -> None:
        """Write the gradients there."""
        self.d_weight, self.d_bias = grad or (None, None)

    def forward(self, x: Array) -> Array:
        raise NotImplementedError

    def backward(self, dy: Array, need_dx: bool) -> Array | None:
        raise NotImplementedError


Layers = dict[str, tuple[Any, ...]]  # by name: the class and its arguments


class Dense(Layer):
    """y = W x + b; x: (inputs, images), or with more axes in front, which are flattened; W: (outputs, inputs)."""

    names = ("weight", "bias")

    def __init__(self, inputs: int, outputs: int) -> None:
        self.shapes = ((outputs, inputs), (outputs,))
        self.fans = inputs + outputs

    def forward(self, x: Array) -> Array:
        self.x_shape = x.shape
        self.x = x.reshape(self.weight.shape[1], x.shape[-1])  # no -1: there may be no images
        return self.weight @ self.x + self.bias[:, None]

    def backward(self, dy: Array, need_dx: bool) -> Array | None:
        self.d_weight[...] = dy @ self.x.T
        self.d_bias[...] = dy.sum(axis=1)
        return (self.weight.T @ dy).reshape(self.x_shape) if need_dx else None


class ConvPool(Layer):
    """Filters of k x k, then the maximum of every 2x2 block, then the bias.

    x: (channels, rows, columns, images); y: (filters, (rows-k+1)/2, (columns-k+1)/2, images), halves rounded down.
    weight: (filters, channels, k, k).
    """

    names = ("weight", "bias")

    def __init__(self, channels: int, filters: int, k: int) -> None:
        self.k = k
        self.shapes = ((filters, channels, k, k), (filters,))
        self.fans = (channels + filters) * k * k

    def forward(self, x: Array) -> Array:
        xp, k, filters = array_module(x), self.k, len(self.weight)
        channels, rows, columns, images = self.x_shape = x.shape
        rows, columns = rows - k + 1, columns - k + 1
        windows = xp.empty((channels, k, k, rows, columns, images), x.dtype)
        for i in range(k):
            for j in range(k):
                windows[:, i, j] = x[:, i : i + rows, j : j + columns]
        self.windows = windows.reshape(channels * k * k, rows * columns * images)
        conv = (self.weight.reshape(filters, -1) @ self.windows).reshape(filters, rows, columns, images)
        self.conv_shape = conv.shape
        a, b, c, d = (conv[block] for block in _blocks(conv.shape))
        # Which of the four is the maximum, the first one where equal: the only ones that get a gradient.
        self.a_wins, self.c_wins = a >= b, c >= d
        upper, lower = xp.maximum(a, b), xp.maximum(c, d)
        self.upper_wins = upper >= lower
        return xp.maximum(upper, lower) + self.bias[:, None, None, None]

    def backward(self, dy: Array, need_dx: bool) -> Array | None:
        xp, k, filters = array_module(dy), self.k, len(self.weight)
        self.d_bias[...] = dy.sum(axis=(1, 2, 3))
        d_conv = xp.zeros(self.conv_shape, dy.dtype)  # zeros: an odd last row or column has no block
        upper = dy * self.upper_wins
        a, b, c, d = (d_conv[block] for block in _blocks(self.conv_shape))
        for d_pair, first_wins, first, second in ((upper, self.a_wins, a, b), (dy - upper, self.c_wins, c, d)):
            xp.multiply(d_pair, first_wins, out=first)
            xp.subtract(d_pair, first, out=second)
        flat = d_conv.reshape(filters, self.windows.shape[1])
        self.d_weight[...] = (flat @ self.windows.T).reshape(self.weight.shape)
        if not need_dx:
            return None
        channels, (_, rows, columns, images) = self.x_shape[0], self.conv_shape
        d_windows = (self.weight.reshape(filters, -1).T @ flat).reshape(channels, k, k, rows, columns, images)
        dx = xp.zeros(self.x_shape, dy.dtype)
        for i in range(k):
            for j in range(k):
                dx[:, i : i + rows, j : j + columns] += d_windows[:, i, j]
        return dx


def _blocks(shape: Sequence[int]) -> list[tuple[slice, ...]]:
    """The four places of a 2x2 block, row by row, as slices of an array of (filters, rows, columns, images)."""
    rows, columns = shape[1] // 2 * 2, shape[2] // 2 * 2
    return [(slice(None), slice(i, rows, 2), slice(j, columns, 2)) for i in (0, 1) for j in (0, 1)]


class Tanh(Layer):
    """y = tanh(x)."""

    def forward(self, x: Array) -> Array:
        self.y = array_module(x).tanh(x)
        return self.y

    def backward(self, dy: Array, need_dx: bool) -> Array | None:
        return dy * (1 - self.y * self.y)


class Relu(Layer):
    """y = max(x, 0)."""

    def forward(self, x: Array) -> Array:
        self.y = array_module(x).maximum(x, 0)
        return self.y

    def backward(self, dy: Array, need_dx: bool) -> Array | None:
        return dy * (self.y > 0)


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """The sum over the images of -log(probability of the right class), and its gradient; logits: (classes, images)."""
    xp = array_module(logits)
    shifted = logits - logits.max(axis=0)  # exp must not overflow
    exp = xp.exp(shifted)
    total = exp.sum(axis=0)
    right = (labels, xp.arange(len(labels)))
    gradient = exp / total
    gradient[right] -= 1
    return (xp.log(total) - shifted[right]).sum(), gradient


class Network:
    """Layers with their parameters, one replica of them per device.

    parameters: name -> `mpikv.Parameter`. A network is a function of (layers, seed): every process that makes it
    with the same seed has the same initial weights.
    """

    def __init__(
        self,
        layers: Layers,
        devices: Sequence[Any] = ("cpu",),
        seed: int = 0,
        dtype: Any = np.float32,
    ) -> None:
        self.dtype = dtype
        self.parameters: dict[str, Parameter] = {}
        self.replicas = [{name: make(*arguments) for name, (make, *arguments) in layers.items()} for _ in devices]
        for i, (name, layer) in enumerate(self.replicas[0].items()):
            random = np.random.Generator(np.random.PCG64((seed, i)))
            for kind in layer.names:
                shape = layer.shapes[layer.names.index(kind)]
                limit = math.sqrt(6 / layer.fans) if kind == "weight" else 0.0
                value = random.uniform(-limit, limit, shape).astype(dtype)
                full_name = f"{name}_{kind}"
                self.parameters[full_name] = Parameter(value, full_name, devices=devices)
        for n, replica in enumerate(self.replicas):
            for name, layer in replica.items():
                layer.bind([parameter.list_data()[n] for parameter in self._of(name, layer)])

    def _of(self, name: str, layer: Layer) -> list[Parameter]:
        return [self.parameters[f"{name}_{kind}"] for kind in layer.names]

    def logits(self, x: Array, replica: int = 0) -> Array:
        """The scores of the classes, (classes, images); x: uint8, (images, 1, rows, columns) on its device."""
        xp = array_module(x)
        activations = xp.ascontiguousarray(x.transpose(1, 2, 3, 0)).astype(self.dtype)
        # 73 is the mean grey of Fashion-MNIST; inputs around 0 bear larger rates (LeCun et al., Efficient BackProp).
        activations -= 73
        activations /= 128
        for layer in self.replicas[replica].values():
            activations = layer.forward(activations)
        return activations

    def loss_and_gradients(
        self, x: Array, labels: Array, replica: int = 0, ready: Callable[[Parameter], None] | None = None
    ) -> Array:
        """The sum of the losses of the images; writes the gradient of that sum into the replica's parameters.

        ready(parameter): called as soon as the gradient of a parameter is there, the last layer's first.
        """
        loss, gradient = softmax_cross_entropy(self.logits(x, replica), labels)
        layers = list(self.replicas[replica].items())
        for name, layer in reversed(layers):
            # Only now: a Trainer may have moved the gradients to memory that the workers share.
            layer.bind_grad([parameter.list_grad()[replica] for parameter in self._of(name, layer)])
            gradient = layer.backward(gradient, need_dx=layer is not layers[0][1])
            if ready is not None:
                for parameter in self._of(name, layer):
                    ready(parameter)
        return loss

    def count_correct(self, x: Array, labels: Array, replica: int = 0) -> int:
        """How many of the images get their label."""
        return int((self.logits(x, replica).argmax(axis=0) == labels).sum())


LENET: Layers = {"conv1": (ConvPool, 1, 20, 5), "tanh1": (Tanh,), "conv2": (ConvPool, 20, 50, 5), "tanh2": (Tanh,)}
LENET |= {"fc1": (Dense, 50 * 4 * 4, 500), "tanh3": (Tanh,), "fc2": (Dense, 500, 10)}  # 431 080 weights
MLP: Layers = {"fc1": (Dense, 28 * 28, 128), "relu1": (Relu,), "fc2": (Dense, 128, 64), "relu2": (Relu,)}
MLP |= {"fc3": (Dense, 64, 10)}  # 109 386 weights
# MXNet's, for images of 28x28 and 10 classes.
NETWORKS = {"lenet": partial(Network, LENET), "mlp": partial(Network, MLP)}
