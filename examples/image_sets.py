"""CIFAR-10 and Fashion-MNIST for networks that take images of 32x32, and the random changes of images in training.

CIFAR-10 is `mpikv.data.Cifar10`, memory-mapped. Fashion-MNIST is as train_mnist.py finds it, with a border of 2 black
pixels.

In training an image of 32x32 is cut out of one with a border of 4 black pixels, and half of them are mirrored. Where it
is cut, and which are mirrored, depends on seed, epoch and the number of the image alone: a run can be repeated, and is
the same on any number of workers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from fetched import CIFAR10_DIR, load_images
from numpy.typing import NDArray

from mpikv.data import ArrayDataset, Cifar10

SIZE, BORDER = 32, 4


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Data sets for training and testing: `take(indices)` gives uint8 (n, channels, 32, 32), and int64 (n,), 0 to 9.

    mean, deviation: float32, of each channel, over the training images. source: one line for the user.
    """

    train: ArrayDataset
    test: ArrayDataset
    mean: NDArray[np.float32]
    deviation: NDArray[np.float32]
    source: str

    @property
    def channels(self) -> int:
        """3, or 1 for grey images."""
        return len(self.mean)

    def scaled(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The images with a mean of 0 and a deviation of 1 in each channel."""
        result: NDArray[np.float32] = (images - self.mean[:, None, None]) / self.deviation[:, None, None]
        return result


def cifar10(directory: str | os.PathLike[str] | None = None) -> ImageSet:
    """CIFAR-10 in a directory, default data/cifar10 in this clone. Local.

    Raises FileNotFoundError or ValueError, in one line that says what to do, where files are missing or wrong.
    """
    folder = CIFAR10_DIR if directory is None else directory
    try:
        train, test = Cifar10(folder), Cifar10(folder, train=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no CIFAR-10: {error}. Run: scripts/get_cifar10 {folder}") from None
    except ValueError as error:
        raise ValueError(f"{error}. Remove it, and run: scripts/get_cifar10 {folder}") from None
    # Of all 50000 training images, on a scale of 0 to 255.
    mean, deviation = np.array([125.31, 122.95, 113.87], np.float32), np.array([62.99, 62.09, 66.71], np.float32)
    source = f"CIFAR-10, {len(train)} training and {len(test)} test images from {folder}"
    return ImageSet(train, test, mean, deviation, source)


def fashion_mnist(directory: str | os.PathLike[str] | None = None) -> ImageSet:
    """What `fetched.load_images` finds, as images of 32x32. Raises as it does."""
    images = load_images(directory)
    border = ((0, 0), (0, 0), (2, 2), (2, 2))
    train = ArrayDataset(np.pad(images.train_x, border), images.train_y)
    test = ArrayDataset(np.pad(images.test_x, border), images.test_y)
    # Of Fashion-MNIST's 60000 training images with their border.
    mean, deviation = np.array([55.8], np.float32), np.array([84.6], np.float32)
    return ImageSet(train, test, mean, deviation, images.source)


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
