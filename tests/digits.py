"""Small real images for tests of training: scikit-learn's digits as the four IDX files of MNIST."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from mpikv.data import mnist

CODES = {"u1": 8, "i1": 9, ">i2": 11, ">i4": 12, ">f4": 13, ">f8": 14}


def idx_bytes(array: np.ndarray, code: str = "u1") -> bytes:
    """An array as an IDX file, with elements of this kind."""
    header = struct.pack(f">HBB{array.ndim}I", 0, CODES[code], array.ndim, *array.shape)
    return header + array.astype(code).tobytes()


def write(directory: Path) -> Path:
    """1500 training and 297 test images into the directory, the same wherever the tests run; the directory."""
    data = mnist._digits()
    for name, array in (
        ("train-images-idx3-ubyte", data.train_x[:, 0]),
        ("train-labels-idx1-ubyte", data.train_y),
        ("t10k-images-idx3-ubyte", data.test_x[:, 0]),
        ("t10k-labels-idx1-ubyte", data.test_y),
    ):
        (directory / name).write_bytes(idx_bytes(array))
    return directory
