"""Real images to train on: Fashion-MNIST or MNIST from files, else the digits that scikit-learn ships.

Looked for in this order:

1. the directory the user names: the four IDX files of MNIST or Fashion-MNIST, packed with gzip or not;
2. `/usr/share/datasets/fashion-mnist`, where Debian's package `dataset-fashion-mnist` puts them;
3. scikit-learn's 1797 handwritten digits of 8x8 pixels, brought to 28x28 so that the same networks take them: every
pixel
   becomes 3x3 equal ones, with a black border of 2, and the grey values 0..16 become 0..255. The last 297 are for
   testing.

The images stay uint8 in memory (47 MB for Fashion-MNIST); a network converts a batch at a time.
Source of the digits: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpikv.data.idx import read_idx
from mpikv.errors import UnsupportedError
from mpikv.runtime.abort import tells

DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_DIGITS_TEST = 297


@dataclass(frozen=True, eq=False)
class Images:
    """Grey images and their labels, for training and for testing.

    train_x, test_x: uint8, (n, 1, 28, 28), 0 is black. train_y, test_y: int64, (n,), 0..9. source: one line for the
    user that says where they come from.

    >>> zeros, none = np.zeros((3, 1, 28, 28), 'uint8'), np.zeros(0, 'int64')
    >>> images = data.Images(zeros, np.array([1, 2, 3]), zeros[:0], none, 'black')
    >>> len(images.first(2).train_x)
    2
    """

    train_x: NDArray[np.uint8]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]
    source: str

    def first(self, n: int) -> Images:
        """Return the first `n` training images (all of them if there are fewer); the test images stay.

        ValueError for n < 1.
        """
        if n < 1:
            raise ValueError(f"at least 1 image is needed to train on, got {n}")
        if n >= len(self.train_x):
            return self
        return replace(self, train_x=self.train_x[:n], train_y=self.train_y[:n], source=f"{self.source}; the first {n}")


@tells
def load_images(data_dir: str | os.PathLike[str] | None = None) -> Images:
    """Return the images in `data_dir`, else the best that this machine has (see the top of the file).

    Local: every worker reads for itself. Raises FileNotFoundError that names the missing files when `data_dir` is
    given and not complete, ValueError for a damaged file, UnsupportedError when there are no files and no
    scikit-learn.

    >>> data.load_images('.')
    Traceback (most recent call last):
    FileNotFoundError: images in .; missing: train-images-idx3-ubyte[.gz], ...
    """
    if data_dir is not None:
        directory = Path(data_dir)
        missing = [name for name in _FILES if _find(directory, name) is None]
        if missing:
            names = ", ".join(f"{name}[.gz]" for name in missing)
            what = "" if directory.is_dir() else ": there is no such directory"
            raise FileNotFoundError(f"images in {directory}{what}; missing: {names}")
        return _from_files(directory)
    if all(_find(DEBIAN_DIR, name) for name in _FILES):
        return _from_files(DEBIAN_DIR)
    return _digits()


def _find(directory: Path, name: str) -> Path | None:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _from_files(directory: Path) -> Images:
    paths = [path for path in (_find(directory, name) for name in _FILES) if path is not None]
    train_x, train_y, test_x, test_y = (read_idx(path, ndim=3 if i % 2 == 0 else 1) for i, path in enumerate(paths))
    for x, y, x_path, y_path in ((train_x, train_y, paths[0], paths[1]), (test_x, test_y, paths[2], paths[3])):
        if x.dtype != np.uint8 or x.shape[1:] != (28, 28):
            raise ValueError(f"{x_path}: images of {x.dtype}, {x.shape[1:]} pixels; expected uint8, (28, 28)")
        if len(x) != len(y):
            raise ValueError(f"{x_path} has {len(x)} images, but {y_path} has {len(y)} labels")
        if len(y) == 0:
            raise ValueError(f"{x_path} has no images")
        if y.min() < 0 or y.max() > 9:
            raise ValueError(f"{y_path}: labels from {y.min()} to {y.max()}; expected 0 to 9")
    return Images(
        train_x[:, None],
        train_y.astype(np.int64),
        test_x[:, None],
        test_y.astype(np.int64),
        f"{len(train_x)} training and {len(test_x)} test images from {directory}",
    )


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - only where no files were found
    except ImportError as error:
        raise UnsupportedError(
            f"no images to train on: install Debian's package dataset-fashion-mnist (it fills {DEBIAN_DIR}), or "
            "name a directory with the IDX files of MNIST or Fashion-MNIST, or pip install scikit-learn for its "
            "handwritten digits"
        ) from error
    digits = load_digits()
    small = np.asarray(digits.images)  # float64, (1797, 8, 8), whole numbers 0..16
    large = np.rint(small * (255 / 16)).astype(np.uint8).repeat(3, axis=1).repeat(3, axis=2)
    x = np.pad(large, ((0, 0), (2, 2), (2, 2)))[:, None]
    y = np.asarray(digits.target, dtype=np.int64)
    cut = len(x) - _DIGITS_TEST
    return Images(
        x[:cut],
        y[:cut],
        x[cut:],
        y[cut:],
        f"scikit-learn's handwritten digits ({cut} for training, {_DIGITS_TEST} for testing), as there is no "
        f"Fashion-MNIST in {DEBIAN_DIR}",
    )
