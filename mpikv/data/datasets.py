"""`ArrayDataset`: arrays whose first axes belong together, or one part of them; and MNIST's files as one.

The arrays stay where they are: of memory-mapped ones only the rows of a batch are copied, so a worker's own memory does
not grow with the data set. (What Linux shows as resident counts mapped pages too, as long as nobody needs the memory.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpikv.common import checks
from mpikv.data.idx import open_idx
from mpikv.data.parts import bounds, check_part
from mpikv.data.rows import Rows
from mpikv.runtime.abort import tells


class ArrayDataset:
    """Arrays whose first axes belong together: `dataset[i]` is the tuple of their rows i.

    Of a single array it is the row itself.

    arrays: one or more of equal length, (n, ...): NumPy arrays, memory maps, anything else that `numpy.asarray` takes.
    num_parts >= 1, 0 <= part_index < num_parts: take that part only, one piece of the n rows; the first n % num_parts
    parts have one row more. Local. Raises ValueError where the lengths differ.

    >>> dataset = data.ArrayDataset(np.arange(6).reshape(3, 2), np.array([7, 8, 9]))
    >>> len(dataset), dataset.take([0, 2])
    (3, (array([[0, 1], [4, 5]]), array([7, 9])))
    """

    @tells
    def __init__(self, *arrays: Any, num_parts: int = 1, part_index: int = 0) -> None:
        if not arrays:
            raise ValueError("a data set is made of one array or more; none was given")
        self.num_parts, self.part_index = check_part(num_parts, part_index)
        rows = [array if isinstance(array, Rows) else _rows(array, i) for i, array in enumerate(arrays)]
        lengths = [len(one) for one in rows]
        if len(set(lengths)) > 1:
            raise ValueError(f"the arrays of a data set are equally long, not {', '.join(map(str, lengths))}")
        self._rows = rows
        self._begin, self._end = bounds(lengths[0], self.num_parts, self.part_index)

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, i: int) -> Any:
        number = checks.whole("the number of an example", i, None)
        found = tuple(array[0] for array in self._take(np.array([number])))
        return found if len(found) > 1 else found[0]

    def take(self, indices: Any) -> Any:
        """Return the batch of these examples. Local.

        It is a tuple of arrays (len(indices), ...), in memory of their own; of a single array, that array. Raises
        IndexError for an example that is not in the part.

        >>> data.ArrayDataset(np.arange(6) * 10).take([5, 0])
        array([50,  0])
        """
        found = self._take(np.asarray(indices, dtype=np.int64))
        return found if len(found) > 1 else found[0]

    def _take(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        n = len(self)
        outside = (indices < -n) | (indices >= n)
        if outside.any():
            where = "" if self.num_parts == 1 else f" in part {self.part_index} of {self.num_parts}"
            raise IndexError(f"example {indices[outside][0]} of {n}{where}")
        places = np.where(indices < 0, indices + n, indices) + self._begin
        return tuple(rows.take(places) for rows in self._rows)


class Mnist(ArrayDataset):
    """MNIST's or Fashion-MNIST's images and labels from IDX files: uint8 (1, height, width), and int64.

    directory: with `train-images-idx3-ubyte` and so on (`t10k-...` for train=False). The files are memory-mapped; those
    packed with gzip (NAME.gz) are unpacked into memory, 47 MB for the training images. Local. Raises FileNotFoundError
    that names what is missing, ValueError for a damaged file or where images and labels differ in number.

    >>> head = bytes([0, 0, 8, 3]) + np.array([1, 2, 2], '>i4').tobytes()  # one image of 2x2
    >>> n_bytes = open('train-images-idx3-ubyte', 'wb').write(head + bytes(4))
    >>> n_bytes = open('train-labels-idx1-ubyte', 'wb').write(bytes([0, 0, 8, 1, 0, 0, 0, 1, 5]))
    >>> image, label = data.Mnist('.')[0]
    >>> image.shape, int(label)
    ((1, 2, 2), 5)
    """

    @tells
    def __init__(self, directory: Any, train: bool = True, *, num_parts: int = 1, part_index: int = 0) -> None:
        folder = Path(checks.path("directory", directory))
        start = "train" if checks.flag("train", train) else "t10k"
        images_path, labels_path = (
            _find(folder, f"{start}-{name}") for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        images, labels = open_idx(images_path, ndim=3), open_idx(labels_path, ndim=1)
        for path, array in ((images_path, images), (labels_path, labels)):
            if array.dtype != np.uint8:
                raise ValueError(f"{path}: elements of {array.dtype}, expected uint8")
        if len(images) != len(labels):
            raise ValueError(f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels")
        rows = Rows([images[:, None]]), Rows([labels], np.int64)
        super().__init__(*rows, num_parts=num_parts, part_index=part_index)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    what = "" if folder.is_dir() else ": there is no such directory"
    raise FileNotFoundError(f"{folder}{what}; missing: {name}, or {name}.gz")


def _rows(array: Any, number: int) -> Rows:
    if isinstance(array, str | bytes | os.PathLike):
        raise checks.wrong(
            f"array {number} of a data set", "an array (np.load, open_idx and the like read files)", array
        )
    found = array if isinstance(array, np.ndarray) else np.asarray(array)
    if found.ndim == 0 or found.dtype == object:
        raise checks.wrong(f"array {number} of a data set", "an array of one axis or more", array)
    return Rows([found])
