"""CIFAR-10 and CIFAR-100: the binary and the pickled ("python") files, memory-mapped.

A binary file is a row of records: one label byte (CIFAR-100: two, coarse and fine), then 3072 bytes of an image, 32x32
red, green, blue. A pickled file is a dict with `data`, an array of n x 3072 uint8 in the same order, and lists of
labels; it is read without executing anything in it (see plain_pickle.py), and its images are mapped where they lie.
Its labels and file names pass through memory while it is opened (2 MB for 10000 images); the labels stay, 8 bytes each.
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

from mpikv import checks
from mpikv.data.datasets import ArrayDataset
from mpikv.data.plain_pickle import PickledArray, Span, read_plain_pickle
from mpikv.data.recordio import FileBytes
from mpikv.data.rows import Rows
from mpikv.files import check_regular
from mpikv.runtime.abort import tells

_IMAGE = (3, 32, 32)
_IMAGE_BYTES = math.prod(_IMAGE)
_AHEAD_BYTES = 1 << 18  # read at once from a pickle


class _Labels(NamedTuple):
    """Where the labels of one kind are: the number of label bytes of a record, which of them, the name in a pickle."""

    label_bytes: int
    place: int
    field: str
    classes: int


_TEN = _Labels(1, 0, "labels", 10)
_COARSE, _FINE = _Labels(2, 0, "coarse_labels", 20), _Labels(2, 1, "fine_labels", 100)


class _Cifar(ArrayDataset):
    """Images and labels of some files."""

    def __init__(self, paths: Sequence[Path], labels: _Labels, num_parts: int, part_index: int) -> None:
        read = _binary if paths[0].suffix == ".bin" else _pickled
        found = [read(str(path), labels) for path in paths]
        self._paths, self._classes = ", ".join(map(str, paths)), labels.classes
        rows = Rows([images for images, _ in found]), Rows([numbers for _, numbers in found], np.int64)
        super().__init__(*rows, num_parts=num_parts, part_index=part_index)

    def _take(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        images, labels = super()._take(indices)
        # Checked where they are taken, since looking at all labels of a binary file reads the whole of it.
        if len(labels) and not 0 <= labels.min() <= labels.max() < self._classes:
            raise ValueError(
                f"{self._paths}: labels from {labels.min()} to {labels.max()}; expected 0 to {self._classes - 1}"
            )
        return images, labels


class Cifar10(_Cifar):
    """CIFAR-10: `dataset[i]` is (image, label): uint8 (3, 32, 32), red first, and an int64 from 0 to 9.

    directory: with the binary files (`data_batch_1.bin`, ...) or the pickled ones (`data_batch_1`, ...), or with the
    folder `cifar-10-batches-bin` or `cifar-10-batches-py` of them. train: the 50000 images for training, else
    the 10000 for testing. num_parts, part_index: as of ArrayDataset. Local. Raises FileNotFoundError that names what
    is missing, ValueError for a file that is no whole number of images or holds something else.

    >>> n_bytes = open('test_batch.bin', 'wb').write(bytes([7]) + bytes(3 * 32 * 32))  # one black image
    >>> image, label = data.Cifar10('.', train=False)[0]
    >>> image.shape, int(label)
    ((3, 32, 32), 7)
    """

    @tells
    def __init__(self, directory: Any, train: bool = True, *, num_parts: int = 1, part_index: int = 0) -> None:
        names = [f"data_batch_{i}" for i in range(1, 6)] if checks.flag("train", train) else ["test_batch"]
        super().__init__(_files(directory, "cifar-10-batches", names), _TEN, num_parts, part_index)


class Cifar100(_Cifar):
    """CIFAR-100: as Cifar10, from `train.bin` and `test.bin`, or the pickled `train` and `test`.

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


def _files(directory: Any, folder: str, names: Sequence[str]) -> list[Path]:
    """The binary files, else the pickled ones."""
    top = Path(checks.path("directory", directory))
    binary, pickled = ("bin", "py") if folder.endswith("batches") else ("binary", "python")
    for place in (top, top / f"{folder}-{binary}", top / f"{folder}-{pickled}"):
        for suffix in (".bin", ""):
            paths = [place / (name + suffix) for name in names]
            if all(path.is_file() for path in paths):
                return paths
    what = "" if top.is_dir() else ": there is no such directory"
    listed = ", ".join(names)
    raise FileNotFoundError(
        f"{top}{what}; expected there, or in {folder}-{binary} or {folder}-{pickled} there: {listed}, each with or all "
        "without .bin"
    )


def _binary(path: str, labels: _Labels) -> tuple[NDArray[Any], NDArray[Any]]:
    """Views of the mapped file."""
    check_regular(path)
    size, record = os.stat(path).st_size, labels.label_bytes + _IMAGE_BYTES
    if size == 0 or size % record:
        raise ValueError(
            f"{path}: {size} bytes, which is no whole number of records of {record} bytes (the last one would begin at "
            f"offset {size - size % record}): truncated, or another kind of file"
        )
    dtype = np.dtype([("labels", "u1", (labels.label_bytes,)), ("image", "u1", _IMAGE)])
    mapped = np.memmap(path, dtype, "r")
    return mapped["image"], mapped["labels"][:, labels.place]


def _pickled(path: str, labels: _Labels) -> tuple[NDArray[Any], NDArray[Any]]:
    """The mapped images, and the labels in memory."""
    file = FileBytes(path)
    try:
        found = read_plain_pickle(file.ahead(_AHEAD_BYTES))
    finally:
        file.close()
    if type(found) is not dict:
        raise ValueError(f"{path}: a pickle of no dict, but {type(found).__name__}; expected CIFAR's dict")
    fields = {key.decode("latin-1"): value for key, value in found.items() if type(key) is bytes}
    missing = [name for name in ("data", labels.field) if name not in fields]
    if missing:
        raise ValueError(f"{path}: no {' and no '.join(missing)} in it; it has {checks.shown(sorted(fields))}")
    images, numbers = _images(path, fields["data"]), fields[labels.field]
    if type(numbers) is not list or not all(type(one) is int and 0 <= one < labels.classes for one in numbers):
        raise ValueError(f"{path}: {labels.field} is no list of whole numbers from 0 to {labels.classes - 1}")
    if len(numbers) != len(images):
        raise ValueError(f"{path}: {len(images)} images, but {len(numbers)} {labels.field}")
    return images, np.array(numbers, dtype=np.int64)


def _images(path: str, data: Any) -> NDArray[Any]:
    if type(data) is not PickledArray or data.content is None:
        raise ValueError(f"{path}: data is no array of uint8, but {type(data).__name__}")
    if len(data.shape) != 2 or data.shape[0] < 1 or data.shape[1] != _IMAGE_BYTES:
        raise ValueError(f"{path}: data has shape {checks.shown(data.shape)}, expected (n, {_IMAGE_BYTES})")
    content, size = data.content, math.prod(data.shape)
    length = content.length if isinstance(content, Span) else len(content)
    if not isinstance(content, Span) or length != size:
        raise ValueError(f"{path}: data has {length} bytes, but its shape {data.shape} makes {size}")
    mapped: NDArray[Any] = np.memmap(path, np.uint8, "r", content.offset, (size,))
    table = mapped.reshape(data.shape, order="F" if data.fortran else "C")
    return table.reshape(len(table), *_IMAGE)
