"""Where the scripts of this clone put the images that they fetch, and Fashion-MNIST from there."""

from __future__ import annotations

import os
from pathlib import Path

from mpikv.data import Images
from mpikv.data import load_images as load_elsewhere

ROOT = Path(__file__).resolve().parents[1]
CIFAR10_DIR = ROOT / "data/cifar10"  # scripts/get_cifar10
FASHION_DIR = ROOT / "data/usr/share/datasets/fashion-mnist"  # scripts/demo, which unpacks a package of Debian's


def load_images(directory: str | os.PathLike[str] | None = None) -> Images:
    """`mpikv.data.load_images`, which without a directory first looks where scripts/demo has put Fashion-MNIST."""
    return load_elsewhere(FASHION_DIR if directory is None and FASHION_DIR.is_dir() else directory)
