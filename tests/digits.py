"""Small real images for tests of training: scikit-learn's digits as the four IDX files of MNIST."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from mpikv.data import mnist


def write(directory: Path) -> Path:
    """1500 training and 297 test images into the directory, the same wherever the tests run; the directory."""
    data = mnist._digits()
    for name, array in (
        ("train-images-idx3-ubyte", data.train_x[:, 0]),
        ("train-labels-idx1-ubyte", data.train_y),
        ("t10k-images-idx3-ubyte", data.test_x[:, 0]),
        ("t10k-labels-idx1-ubyte", data.test_y),
    ):
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (directory / name).write_bytes(header + array.astype(np.uint8).tobytes())
    return directory
