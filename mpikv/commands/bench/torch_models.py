"""Networks for `mpikv bench train`, in plain PyTorch.

resnet18: as in K. He et al., Deep Residual Learning for Image Recognition, CVPR 2016, with 1000 classes; its parameters
have the shapes that models.py lists. lenet: convolutions of 20 and 50 channels, as there. mlp: three layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


class _Block(nn.Module):  # type: ignore[misc] # PyTorch is not looked at
    def __init__(self, channels: int, inside: int, stride: int) -> None:
        super().__init__()
        self.one = _convolution(channels, inside, 3, stride)
        self.two = _convolution(inside, inside, 3, 1)
        self.around = _convolution(channels, inside, 1, stride) if channels != inside else nn.Identity()

    def forward(self, x: Any) -> Any:
        return nn.functional.relu(self.around(x) + self.two(nn.functional.relu(self.one(x))))


def _convolution(channels: int, inside: int, size: int, stride: int) -> Any:
    return nn.Sequential(
        nn.Conv2d(channels, inside, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(inside)
    )


def _resnet18(_image_size: int) -> Any:
    layers: list[Any] = [_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for inside in (64, 128, 256, 512):
        for place in range(2):
            layers.append(_Block(channels, inside, 2 if place == 0 and inside > 64 else 1))
            channels = inside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def _lenet(_image_size: int) -> Any:
    convolutions = [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


def _mlp(image_size: int) -> Any:
    layers = [nn.Linear(image_size**2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


# What makes it of a side of its images in pixels, their channels, and its classes.
_NETWORKS: Mapping[str, tuple[Callable[[int], Any], int, int]] = {
    "resnet18": (_resnet18, 3, 1000),
    "lenet": (_lenet, 1, 10),
    "mlp": (_mlp, 1, 10),
}


def make(name: str, pixels: int, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _NETWORKS[name][0](pixels)


def batch(name: str, pixels: int, examples: int, seed: int) -> tuple[Any, Any]:
    """Make images (examples, channels, pixels, pixels), float32, and labels, drawn from `seed`."""
    _, channels, classes = _NETWORKS[name]
    drawn = torch.Generator().manual_seed(seed)
    images = torch.randn((examples, channels, pixels, pixels), generator=drawn)
    return images, torch.randint(classes, (examples,), generator=drawn)
