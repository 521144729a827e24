"""ResNet-18, VGG-11 and LeNet for images of 32x32, in plain PyTorch.

resnet18: K. He et al., Deep Residual Learning for Image Recognition, CVPR 2016, with another first layer: theirs brings
images of 224x224 to 56x56 before the blocks, and would bring these to 8x8. Here a convolution of 3x3 brings them to
16x16: 11.2 million weights, 0.14 billion multiplications for an image. resnet18-large leaves 32x32, as is usual for
CIFAR-10: four times as many multiplications, and a better accuracy after a long training, which wants a GPU.
vgg11: K. Simonyan, A. Zisserman, Very Deep Convolutional Networks, ICLR 2015, with batch normalisation, and one layer
behind the convolutions, which leave one pixel: 9.2 million weights, 0.15 billion multiplications.
lenet: MXNet's, as in networks.py: filters of 5x5, 20 and 50, and 500 hidden units, here with ReLU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def _convolution(channels: int, filters: int, size: int, stride: int) -> nn.Sequential:
    """Without a bias, which the batch normalisation has."""
    convolution = nn.Conv2d(channels, filters, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(filters))


class Block(nn.Module):
    """Two convolutions of 3x3, and a way around them: as it is, or a convolution of 1x1 where the shape changes."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.one = _convolution(channels, filters, 3, stride)
        self.two = _convolution(filters, filters, 3, 1)
        same = channels == filters and stride == 1
        self.around = nn.Identity() if same else _convolution(channels, filters, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (images, channels, rows, columns)."""
        return nn.functional.relu(self.around(x) + self.two(nn.functional.relu(self.one(x))))


def _resnet18(channels: int, classes: int, first_stride: int) -> nn.Sequential:
    layers: list[nn.Module] = [_convolution(channels, 64, 3, first_stride), nn.ReLU()]
    before = 64
    for filters in (64, 128, 256, 512):
        layers += [Block(before, filters, 1 if filters == 64 else 2), Block(filters, filters, 1)]
        before = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def resnet18(channels: int, classes: int) -> nn.Sequential:
    """(images, channels, 32, 32) to (images, classes)."""
    return _resnet18(channels, classes, first_stride=2)


def resnet18_large(channels: int, classes: int) -> nn.Sequential:
    """As `resnet18`, with four times as many pixels in every layer."""
    return _resnet18(channels, classes, first_stride=1)


def vgg11(channels: int, classes: int) -> nn.Sequential:
    """(images, channels, 32, 32) to (images, classes)."""
    layers: list[nn.Module] = []
    before = channels
    for stage in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for filters in stage:
            layers += [_convolution(before, filters, 3, 1), nn.ReLU()]
            before = filters
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, classes))


def lenet(channels: int, classes: int) -> nn.Sequential:
    """(images, channels, 32, 32) to (images, classes)."""
    first = [nn.Conv2d(channels, 20, 5), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(50 * 5 * 5, 500), nn.ReLU(), nn.Linear(500, classes))


NETWORKS: dict[str, Callable[[int, int], nn.Sequential]] = {
    "resnet18": resnet18,
    "resnet18-large": resnet18_large,
    "vgg11": vgg11,
    "lenet": lenet,
}
