"""CIFAR-10 and Fashion-MNIST for networks that take images of 32x32, and the random changes of images in training.

CIFAR-10: its binary files, as scripts/get_cifar10 writes them, or CIFAR-10's own. A record is a label, 0 to 9, then
1024 bytes of red, of green and of blue, row by row. Source: A. Krizhevsky, The CIFAR-10 dataset, "Binary version".
Fashion-MNIST: as train_mnist.py finds it, with a border of 2 black pixels.

In training an image of 32x32 is cut out of one with a border of 4 black pixels, and half of them are mirrored. Where it
is cut, and which are mirrored, depends on seed, epoch and the number of the image alone: a run can be repeated, and is
the same on any number of workers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from fetched import CIFAR10_DIR, load_images
from numpy.typing import NDArray

CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
SIZE, BORDER = 32, 4
RECORD_BYTES = 1 + 3 * SIZE * SIZE


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with labels: train_x, test_x: uint8, (n, channels, 32, 32); train_y, test_y: int64, (n,), 0 to 9.

    mean, deviation: float32, of each channel, over the training images. source: one line for the user.
    """

    train_x: NDArray[np.uint8]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]
    mean: NDArray[np.float32]
    deviation: NDArray[np.float32]
    source: str

    @property
    def channels(self) -> int:
        """3, or 1 for grey images."""
        return int(self.train_x.shape[1])

    def first(self, n: int) -> ImageSet:
        """The first `n` training images, or all where there are fewer. mean and deviation stay."""
        return replace(self, train_x=self.train_x[:n], train_y=self.train_y[:n])

    def scaled(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The images with a mean of 0 and a deviation of 1 in each channel."""
        result: NDArray[np.float32] = (images - self.mean[:, None, None]) / self.deviation[:, None, None]
        return result


def cifar10(directory: str | os.PathLike[str] | None = None) -> ImageSet:
    """CIFAR-10 in a directory, default data/cifar10 in this clone. Local.

    Raises FileNotFoundError or ValueError, in one line that says what to do, where a file is missing or another one.
    """
    folder = CIFAR10_DIR if directory is None else Path(directory)
    missing = [name for name in CIFAR10_FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"no CIFAR-10 in {folder}: no {', '.join(missing)}. Run: scripts/get_cifar10 {folder}")
    *train, test = (_records(folder / name) for name in CIFAR10_FILES)
    train_x, train_y = _split(np.concatenate(train))
    # Of all 50000 training images, on a scale of 0 to 255.
    mean, deviation = np.array([125.31, 122.95, 113.87], np.float32), np.array([62.99, 62.09, 66.71], np.float32)
    source = f"CIFAR-10, {len(train_x)} training and {len(test)} test images from {folder}"
    return ImageSet(train_x, train_y, *_split(test), mean, deviation, source)


def _records(path: Path) -> NDArray[np.uint8]:
    remedy = f"Remove it, and run: scripts/get_cifar10 {path.parent}"
    size = path.stat().st_size
    if size == 0 or size % RECORD_BYTES:
        raise ValueError(
            f"{path} is no binary file of CIFAR-10: {size} bytes, not a multiple of {RECORD_BYTES}. {remedy}"
        )
    records = np.memmap(path, np.uint8, "r").reshape(-1, RECORD_BYTES)
    highest = records[:, 0].max()
    if highest > 9:
        raise ValueError(f"{path} is no binary file of CIFAR-10: it has a label {highest}, not 0 to 9. {remedy}")
    return records


def _split(records: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    return records[:, 1:].reshape(-1, 3, SIZE, SIZE), records[:, 0].astype(np.int64)


def fashion_mnist(directory: str | os.PathLike[str] | None = None) -> ImageSet:
    """What `fetched.load_images` finds, as images of 32x32. Raises as it does."""
    images = load_images(directory)
    border = ((0, 0), (0, 0), (2, 2), (2, 2))
    train_x, test_x = np.pad(images.train_x, border), np.pad(images.test_x, border)
    # Of Fashion-MNIST's 60000 training images with their border.
    mean, deviation = np.array([55.8], np.float32), np.array([84.6], np.float32)
    return ImageSet(train_x, images.train_y, test_x, images.test_y, mean, deviation, images.source)


def changed(images: NDArray[np.uint8], indices: NDArray[np.int64], draws: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The images with these numbers, each cut out and mirrored as its random number says. draws: as `draw` makes."""
    n, span = len(indices), 2 * BORDER + 1
    random = draws[indices]
    around = np.pad(images[indices], ((0, 0), (0, 0), (BORDER, BORDER), (BORDER, BORDER)))
    windows = np.lib.stride_tricks.sliding_window_view(around, (SIZE, SIZE), axis=(2, 3))
    rows, columns = (random % span).astype(np.int64), (random // span % span).astype(np.int64)
    result: NDArray[np.uint8] = windows[np.arange(n), :, rows, columns]
    mirrored = random // (span * span) % 2 == 1
    result[mirrored] = result[mirrored, :, :, ::-1]
    return result


def draw(n: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """A random number for each image in an epoch. The stream is another one than that of SplitSampler's order."""
    return np.random.PCG64(np.random.SeedSequence((seed, epoch, 1))).random_raw(n)
