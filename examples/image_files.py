"""The images that the examples train on: the files of MNIST and Fashion-MNIST, and those of CIFAR-10.

An IDX file (MNIST) is two zero bytes, the type of the elements (8: bytes), the number of axes, the length of each axis
as a big-endian 32-bit integer, then the elements in C order; it may be packed with gzip. A binary file of CIFAR-10 is a
row of records: a label byte, then 3072 bytes of a 32x32 image, red, green, blue. Sources: Y. LeCun, C. Cortes, C.
Burges, "The MNIST database"; A. Krizhevsky, "Learning multiple layers of features from tiny images" (2009).

Every worker reads whole files into its memory: 47 MB of Fashion-MNIST, 184 MB of CIFAR-10.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpikv import UnsupportedError

ROOT = Path(__file__).resolve().parents[1]
CIFAR10_DIR = ROOT / "data/cifar10"  # scripts/get_cifar10
FASHION_DIR = ROOT / "data/usr/share/datasets/fashion-mnist"  # scripts/demo, which unpacks a package of Debian's
DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")
CIFAR10_RECORD = 1 + 3 * 32 * 32  # bytes
DIGITS_TEST = 297  # of scikit-learn's 1797 digits
Pair = tuple[NDArray[np.uint8], NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class Images:
    """Images for training and for testing: uint8, (n, channels, height, width), 0 is black; int64 labels, 0 to 9.

    source: one line for the user that says where they come from.
    """

    train_x: NDArray[np.uint8]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]
    source: str

    def first(self, n: int) -> Images:
        """The first `n` training images, or all of them; the test images stay."""
        if n >= len(self.train_x):
            return self
        return replace(self, train_x=self.train_x[:n], train_y=self.train_y[:n], source=f"{self.source}; the first {n}")


def load_images(directory: str | os.PathLike[str] | None = None) -> Images:
    """MNIST or Fashion-MNIST in a directory; else Fashion-MNIST where this machine has it, else scikit-learn's digits.

    Raises FileNotFoundError or ValueError that names the file where one is missing or damaged.
    """
    if directory is None and not FASHION_DIR.is_dir() and not DEBIAN_DIR.is_dir():
        return digits()
    folder = Path(directory or (FASHION_DIR if FASHION_DIR.is_dir() else DEBIAN_DIR))
    names = [f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]
    places = [[path for path in (folder / name, folder / f"{name}.gz") if path.is_file()] for name in names]
    if missing := [f"{name}[.gz]" for name, found in zip(names, places, strict=True) if not found]:
        what = "" if folder.is_dir() else ": there is no such directory"
        raise FileNotFoundError(f"images in {folder}{what}; missing: {', '.join(missing)}")
    paths = [found[0] for found in places]
    train, test = idx_pair(*paths[:2]), idx_pair(*paths[2:])
    return Images(*train, *test, f"{len(train[0])} training and {len(test[0])} test images from {folder}")


def idx_pair(of_images: Path, of_labels: Path) -> Pair:
    x, y = read_idx(of_images, 3), read_idx(of_labels, 1)
    if len(x) != len(y):
        raise ValueError(f"{of_images} has {len(x)} images, but {of_labels} has {len(y)} labels")
    if x.shape[1:] != (28, 28) or len(x) == 0:
        raise ValueError(f"{of_images}: {len(x)} images of {x.shape[1:]} pixels; expected one or more of (28, 28)")
    return x[:, None], checked_labels(of_labels, y)


def checked_labels(path: Path, labels: NDArray[np.uint8]) -> NDArray[np.int64]:
    if labels.max() > 9:
        raise ValueError(f"{path}: labels from {labels.min()} to {labels.max()}; expected 0 to 9")
    return labels.astype(np.int64)


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """The array of bytes in an IDX file, with so many axes. ValueError where it is anything else or damaged."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged or truncated gzip file ({error}); fetch it again") from error
    start = 4 + 4 * axes
    if raw[:4] != bytes([0, 0, 8, axes]) or len(raw) < start:
        raise ValueError(f"{path}: no IDX file of bytes with {axes} axes: it begins with {raw[:start].hex(' ')}")
    shape = struct.unpack(f">{axes}I", raw[4:start])
    if len(raw) - start != math.prod(shape):
        raise ValueError(
            f"{path}: {'truncated' if len(raw) - start < math.prod(shape) else 'too long'} IDX file: shape {shape}, as "
            f"its header says, makes {start + math.prod(shape)} bytes; there are {len(raw)}"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()


def digits() -> Images:
    """Handwritten digits of 8x8 pixels, made 28x28: each pixel 3x3 equal ones, a black border of 2, grey up to 255."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - only where no files were found
    except ImportError as error:
        raise UnsupportedError(
            f"no images to train on: install Debian's package dataset-fashion-mnist (it fills {DEBIAN_DIR}), or name a "
            "directory with the IDX files of MNIST or Fashion-MNIST, or pip install scikit-learn for its handwritten "
            "digits"
        ) from error
    found, cut = load_digits(), -DIGITS_TEST
    large = np.rint(found.images * (255 / 16)).astype(np.uint8).repeat(3, axis=1).repeat(3, axis=2)
    x, y = np.pad(large, ((0, 0), (2, 2), (2, 2)))[:, None], found.target.astype(np.int64)
    source = f"scikit-learn's handwritten digits ({len(x) + cut} for training, {DIGITS_TEST} for testing)"
    return Images(x[:cut], y[:cut], x[cut:], y[cut:], f"{source}, as there is no Fashion-MNIST in {DEBIAN_DIR}")


def load_cifar10(directory: str | os.PathLike[str] | None = None) -> Images:
    """CIFAR-10 in a directory, default data/cifar10 in this clone, or in the folder cifar-10-batches-bin there.

    Raises FileNotFoundError or ValueError, in one line that says what to do, where files are missing or damaged.
    """
    top = Path(directory or CIFAR10_DIR)
    todo, names = f"run: scripts/get_cifar10 {top}", [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    folder = top if (top / "test_batch.bin").is_file() else top / "cifar-10-batches-bin"
    paths = [folder / f"{name}.bin" for name in names]
    if missing := [path.name for path in paths if not path.is_file()]:
        # CIFAR-10's "python" files are pickles, programs that their reader would have to execute.
        pickled = " (pickled files are not read)" if any(top.glob("**/test_batch")) else ""
        raise FileNotFoundError(f"no CIFAR-10 in {top}{pickled}, missing: {', '.join(missing)}; {todo}")
    found = []
    for path in paths:
        raw = np.fromfile(path, np.uint8)
        if not len(raw) or len(raw) % CIFAR10_RECORD or raw[::CIFAR10_RECORD].max() > 9:
            raise ValueError(
                f"{path}: no records of {CIFAR10_RECORD} bytes, a label of 0 to 9 first; remove it, {todo}"
            )
        found.append(raw.reshape(-1, CIFAR10_RECORD))
    train, test = np.concatenate(found[:5]), found[5]
    x, y = ([part[:, 1:].reshape(-1, 3, 32, 32) for part in (train, test)], [train[:, 0], test[:, 0]])
    source = f"CIFAR-10, {len(train)} training and {len(test)} test images from {top}"
    return Images(x[0], y[0].astype(np.int64), x[1], y[1].astype(np.int64), source)
