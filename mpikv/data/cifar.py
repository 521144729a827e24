"""CIFAR-10 and CIFAR-100: their binary files, memory-mapped.

A file is a row of records: one label byte (CIFAR-100: two, coarse and fine), then 3072 bytes of an image, 32x32 red,
green, blue. The "python" files of the same images are pickles, programs that their reader would have to execute, and
are not read.
Source: A. Krizhevsky, "Learning multiple layers of features from tiny images" (2009), and the data set's own page.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpikv.common import checks
from mpikv.common.files import open_regular
from mpikv.data.datasets import ArrayDataset, Rows
from mpikv.runtime.abort import tells

_IMAGE = (3, 32, 32)
_IMAGE_BYTES = math.prod(_IMAGE)
# The folders of the archives with binary files, and of those with pickled ones.
_FOLDERS = {
    "cifar-10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
    "cifar-100": ("cifar-100-binary", "cifar-100-python"),
}


class _Labels(NamedTuple):
    """Where the labels of one kind are: the number of label bytes of a record, and which of them."""

    label_bytes: int
    place: int
    classes: int


_TEN = _Labels(1, 0, 10)
_COARSE, _FINE = _Labels(2, 0, 20), _Labels(2, 1, 100)


class _Cifar(ArrayDataset):
    """Images and labels of some files."""

    def __init__(self, paths: Sequence[Path], labels: _Labels, num_parts: int, part_index: int) -> None:
        found = [_mapped(str(path), labels) for path in paths]
        self._paths, self._classes = ", ".join(map(str, paths)), labels.classes
        rows = Rows([images for images, _ in found]), Rows([numbers for _, numbers in found], np.int64)
        super().__init__(*rows, num_parts=num_parts, part_index=part_index)

    def _take(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        images, labels = super()._take(indices)
        # Checked where they are taken, since looking at all labels of a file reads the whole of it.
        if len(labels) and not 0 <= labels.min() <= labels.max() < self._classes:
            raise ValueError(
                f"{self._paths}: labels from {labels.min()} to {labels.max()}; expected 0 to {self._classes - 1}"
            )
        return images, labels


class Cifar10(_Cifar):
    """CIFAR-10: `dataset[i]` is (image, label): uint8 (3, 32, 32), red first, and an int64 from 0 to 9.

    directory: with the binary files (`data_batch_1.bin`, ...), or with the folder `cifar-10-batches-bin` of them.
    train: the 50000 images for training, else the 10000 for testing. num_parts, part_index: as of ArrayDataset. Local.
    Raises FileNotFoundError that names what is missing, or says that there are only the pickled files, which are not
    read; ValueError for a file that is no whole number of images or holds something else.

    >>> n_bytes = open('test_batch.bin', 'wb').write(bytes([7]) + bytes(3 * 32 * 32))  # one black image
    >>> image, label = data.Cifar10('.', train=False)[0]
    >>> image.shape, int(label)
    ((3, 32, 32), 7)
    """

    @tells
    def __init__(self, directory: Any, train: bool = True, *, num_parts: int = 1, part_index: int = 0) -> None:
        names = [f"data_batch_{i}" for i in range(1, 6)] if checks.flag("train", train) else ["test_batch"]
        super().__init__(_files(directory, "cifar-10", names), _TEN, num_parts, part_index)


class Cifar100(_Cifar):
    """CIFAR-100: as Cifar10, from `train.bin` and `test.bin`, or the folder `cifar-100-binary` of them.

    coarse: the labels are the 20 superclasses instead of the 100 classes.

    >>> n_bytes = open('test.bin', 'wb').write(bytes([3, 42]) + bytes(3 * 32 * 32))  # one black image
    >>> image, label = data.Cifar100('.', train=False)[0]
    >>> image.shape, int(label)
    ((3, 32, 32), 42)
    """

    @tells
    def __init__(
        self, directory: Any, train: bool = True, *, coarse: bool = False, num_parts: int = 1, part_index: int = 0
    ) -> None:
        names = ["train" if checks.flag("train", train) else "test"]
        labels = _COARSE if checks.flag("coarse", coarse) else _FINE
        super().__init__(_files(directory, "cifar-100", names), labels, num_parts, part_index)


def _files(directory: Any, dataset: str, names: Sequence[str]) -> list[Path]:
    top = Path(checks.path("directory", directory))
    folder, pickled = _FOLDERS[dataset]
    expected = ", ".join(f"{name}.bin" for name in names)
    for place in (top, top / folder):
        paths = [place / f"{name}.bin" for name in names]
        if all(path.is_file() for path in paths):
            return paths
    for place in (top, top / pickled):
        if all((place / name).is_file() for name in names):
            raise FileNotFoundError(
                f"{place} has {dataset}'s pickled files, which are not read, for unpickling a file executes what it "
                f"says; put the files of {dataset}-binary.tar.gz there instead: {expected}"
            )
    what = "" if top.is_dir() else ": there is no such directory"
    raise FileNotFoundError(f"{top}{what}; expected there, or in {folder} there: {expected}")


def _mapped(path: str, labels: _Labels) -> tuple[NDArray[Any], NDArray[Any]]:
    """Views of the mapped file."""
    with open_regular(path) as file:
        size, record = os.fstat(file.fileno()).st_size, labels.label_bytes + _IMAGE_BYTES
        if size == 0 or size % record:
            raise ValueError(
                f"{path}: {size} bytes, which is no whole number of records of {record} bytes (the last one would "
                f"begin at offset {size - size % record}): truncated, or another kind of file"
            )
        dtype = np.dtype([("labels", "u1", (labels.label_bytes,)), ("image", "u1", _IMAGE)])
        mapped = np.memmap(file, dtype, "r")
    return mapped["image"], mapped["labels"][:, labels.place]
