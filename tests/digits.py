"""Small real images for tests of training: scikit-learn's digits as the four IDX files of MNIST."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import image_files


def idx_bytes(array: np.ndarray) -> bytes:
    """An array of bytes as an IDX file."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype("u1").tobytes()


def write(directory: Path) -> Path:
    """1500 training and 297 test images into the directory, the same wherever the tests run; the directory."""
    data = image_files.digits()
    for name, array in (
        ("train-images-idx3-ubyte", data.train_x[:, 0]),
        ("train-labels-idx1-ubyte", data.train_y),
        ("t10k-images-idx3-ubyte", data.test_x[:, 0]),
        ("t10k-labels-idx1-ubyte", data.test_y),
    ):
        (directory / name).write_bytes(idx_bytes(array))
    return directory
