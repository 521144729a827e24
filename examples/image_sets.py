"""CIFAR-10 and Fashion-MNIST for networks that take images of 32x32, and the random changes of images in training.

Fashion-MNIST, as image_files.py finds it, gets a border of 2 black pixels.

In training an image of 32x32 is cut out of one with a border of 4 black pixels, and half of them are mirrored. Where it
is cut, and which are mirrored, depends on seed, epoch and the number of the image alone: a run can be repeated, and is
the same on any number of workers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from image_files import Images, load_cifar10, load_images
from numpy.typing import NDArray

SIZE, BORDER = 32, 4


@dataclass(frozen=True, eq=False)
class ImageSet(Images):
    """Of 32x32 pixels. mean, deviation: float32, of each channel, over the training images, on a scale of 0 to 255."""

    mean: NDArray[np.float32]
    deviation: NDArray[np.float32]

    def scaled(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The images with a mean of 0 and a deviation of 1 in each channel."""
        result: NDArray[np.float32] = (images - self.mean[:, None, None]) / self.deviation[:, None, None]
        return result


def cifar10(directory: str | os.PathLike[str] | None = None) -> ImageSet:
    mean, deviation = [125.31, 122.95, 113.87], [62.99, 62.09, 66.71]
    return ImageSet(**vars(load_cifar10(directory)), mean=np.float32(mean), deviation=np.float32(deviation))


def fashion_mnist(directory: str | os.PathLike[str] | None = None) -> ImageSet:
    border = ((0, 0), (0, 0), (2, 2), (2, 2))
    found = vars(load_images(directory))
    found |= {name: np.pad(found[name], border) for name in ("train_x", "test_x")}
    return ImageSet(**found, mean=np.float32([55.8]), deviation=np.float32([84.6]))  # with the border


def changed(images: NDArray[np.uint8], random: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The images, each cut out and mirrored as its random number says. random: (n,), of these images, from `draw`."""
    span = 2 * BORDER + 1
    around = np.pad(images, ((0, 0), (0, 0), (BORDER, BORDER), (BORDER, BORDER)))
    windows = np.lib.stride_tricks.sliding_window_view(around, (SIZE, SIZE), axis=(2, 3))
    rows, columns = (random % span).astype(np.int64), (random // span % span).astype(np.int64)
    result: NDArray[np.uint8] = windows[np.arange(len(images)), :, rows, columns]
    mirrored = random // (span * span) % 2 == 1
    result[mirrored] = result[mirrored, :, :, ::-1]
    return result


def draw(n: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """A random number for each of `n` images in an epoch. Another stream than that of SplitSampler's order."""
    return np.random.PCG64(np.random.SeedSequence((seed, epoch, 1))).random_raw(n)
