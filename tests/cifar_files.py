"""Small made images in CIFAR-10's binary format, for tests: the color says the label, more or less."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write(directory: Path, train: int = 80, test: int = 20) -> Path:
    """`train` images in five files and `test` in one, always the same; the directory. train: a multiple of 5."""
    random = np.random.default_rng(5)
    colors = random.integers(0, 256, (10, 3))
    directory.mkdir(parents=True, exist_ok=True)
    for i in range(6):
        n = test if i == 5 else train // 5
        labels = random.integers(0, 10, n)
        pixels = np.clip(colors[labels][:, :, None] + random.normal(0, 40, (n, 3, 1024)), 0, 255)
        records = np.concatenate([labels[:, None], pixels.reshape(n, -1)], axis=1).astype(np.uint8)
        name = "test_batch.bin" if i == 5 else f"data_batch_{i + 1}.bin"
        (directory / name).write_bytes(records.tobytes())
    return directory
