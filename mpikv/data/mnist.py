"""MNIST and Fashion-MNIST: their files, which are in the IDX format, and the best images that a machine has.

An IDX file is two zero bytes, a byte for the type of the elements, a byte for the number of axes, the length of each
axis as a big-endian unsigned 32-bit integer, then the elements in C order, big-endian. It may be packed with gzip,
which is seen from its first two bytes, not from the name. Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST
database", section on the file format.

`read_idx` reads the whole file: memory is twice the array for a moment where it is packed. `open_idx` maps it.

`load_images` looks for images in this order:

1. the directory the user names: the four IDX files of MNIST or Fashion-MNIST, packed with gzip or not;
2. `/usr/share/datasets/fashion-mnist`, where Debian's package `dataset-fashion-mnist` puts them;
3. scikit-learn's 1797 handwritten digits of 8x8 pixels, brought to 28x28 so that the same networks take them: every
   pixel becomes 3x3 equal ones, with a black border of 2, and the grey values 0..16 become 0..255. The last 297 are for
   testing. Their source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
   Repository.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mpikv.common import checks
from mpikv.common.files import open_regular
from mpikv.data.datasets import ArrayDataset, Rows, bounds, check_part
from mpikv.errors import UnsupportedError
from mpikv.runtime.abort import tells

DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")
_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"
_LONGEST_HEADER = 4 + 4 * 255
_READ_BYTES = 1 << 20
_TRAIN, _TEST = "train", "t10k"  # how the names of the files begin
_DIGITS_TEST = 297

# --- IDX


@tells
def read_idx(path: str | os.PathLike[str], *, ndim: int | None = None) -> NDArray[Any]:
    """Return the array in the file, in the machine's byte order, writable.

    ndim: the number of axes it must have; any if None. Local. Raises OSError when the file cannot be read,
    ValueError that names the file when it is no IDX file, is cut short, is too long, or has another number of axes.

    >>> n_bytes = open('labels', 'wb').write(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 9]))
    >>> data.read_idx('labels', ndim=1)
    array([5, 9], dtype=uint8)
    """
    with open_regular(checks.path("path", path)) as file:
        packed = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        raw = _unpacked(path, file, ndim) if packed else file.read()
    start, shape, dtype = _layout(path, raw, len(raw), ndim)
    return np.frombuffer(raw, dtype=dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


@tells
def open_idx(
    path: str | os.PathLike[str], *, ndim: int | None = None, num_parts: int = 1, part_index: int = 0
) -> NDArray[Any]:
    """Return the array in the file, memory-mapped and read-only: what is used is read from the file then.

    num_parts >= 1, 0 <= part_index < num_parts: take that part along the first axis, as `ArrayDataset` does.
    ndim and errors: as of `read_idx`. Local.

    Elements of several bytes are big-endian, as they are in the file. A file packed with gzip cannot be mapped and is
    read as by `read_idx`.

    >>> n_bytes = open('labels', 'wb').write(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 9]))
    >>> data.open_idx('labels', num_parts=2, part_index=1).tolist()
    [9]
    """
    name = checks.path("path", path)
    check_part(num_parts, part_index)
    array = _whole(name, ndim)
    if num_parts == 1:
        return array
    if array.ndim == 0:
        raise ValueError(f"{path}: an array without axes, which has no parts")
    begin, end = bounds(len(array), num_parts, part_index)
    return array[begin:end]


def _whole(name: str, ndim: int | None) -> NDArray[Any]:
    with open_regular(name) as file:
        raw, size = file.read(_LONGEST_HEADER), os.fstat(file.fileno()).st_size
        if raw[:2] == _GZIP_MAGIC:
            return read_idx(name, ndim=ndim)
        start, shape, dtype = _layout(name, raw, size, ndim)
        if 0 in shape:  # no bytes cannot be mapped
            return np.empty(shape, dtype)
        return np.memmap(file, dtype, "r", start, shape)


def _unpacked(path: Any, file: IO[bytes], ndim: int | None) -> bytearray:
    """Return what is packed in the file, but at most a byte more than its header says: a small file may hold much."""
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            raw = bytearray(stream.read(_LONGEST_HEADER))
            start, shape, dtype = _header(path, raw, len(raw), ndim)
            most = start + math.prod(shape) * dtype.itemsize + 1
            # Bit by bit: of a damaged header's length nothing is allocated before it is there.
            while len(raw) < most and (more := stream.read(min(_READ_BYTES, most - len(raw)))):
                raw += more
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged or truncated gzip file ({error}); fetch it again") from error
    return raw


def _layout(
    path: Any, raw: bytes | bytearray, size: int, ndim: int | None
) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Where the elements begin in a file of `size` bytes that begins with `raw`, the array's shape, and its dtype."""
    start, shape, dtype = _header(path, raw, size, ndim)
    # Python's integers: a damaged header must not overflow into a length that fits.
    expected_bytes = start + math.prod(shape) * dtype.itemsize
    if size != expected_bytes:
        what = "truncated" if size < expected_bytes else "too long"
        raise ValueError(
            f"{path}: {what} IDX file: shape {shape} of {dtype.itemsize}-byte elements, as its header says, makes "
            f"{expected_bytes} bytes; the file has {size if size < expected_bytes else 'more'}"
        )
    return start, shape, dtype


def _header(
    path: Any, raw: bytes | bytearray, size: int, ndim: int | None
) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Return the same as `_layout`, whether or not the file is as long as its header says."""
    if len(raw) < 4:
        raise ValueError(f"{path}: truncated IDX file: {size} bytes, the header alone has 4 or more")
    zeros, code, axes = struct.unpack(">HBB", raw[:4])
    if zeros or code not in _DTYPES:
        raise ValueError(
            f"{path}: not an IDX file: it starts with {raw[:4].hex(' ')}; expected 00 00, a type (08, 09, 0b to 0e) "
            "and the number of axes"
        )
    if ndim is not None and axes != ndim:
        raise ValueError(f"{path}: the array has {axes} axes, expected {ndim}")
    start = 4 + 4 * axes
    if len(raw) < start:
        raise ValueError(f"{path}: truncated IDX file: {size} bytes, the header of {axes} axes has {start}")
    shape = struct.unpack(f">{axes}I", raw[4:start])
    return start, shape, np.dtype(_DTYPES[code])


# --- images and labels


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
        paths = _files(folder, [_TRAIN if checks.flag("train", train) else _TEST])
        images, labels = _read(paths, open_idx)
        super().__init__(Rows([images]), Rows([labels], np.int64), num_parts=num_parts, part_index=part_index)


def _files(directory: Path, starts: Sequence[str]) -> list[Path]:
    """The files of images and of labels whose names begin so. FileNotFoundError that names those that are missing."""
    names = [f"{start}-{name}" for start in starts for name in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    places = [[path for path in (directory / name, directory / f"{name}.gz") if path.is_file()] for name in names]
    missing = [f"{name}[.gz]" for name, place in zip(names, places, strict=True) if not place]
    if missing:
        what = "" if directory.is_dir() else ": there is no such directory"
        raise FileNotFoundError(f"images in {directory}{what}; missing: {', '.join(missing)}")
    return [place[0] for place in places]


def _read(paths: Sequence[Path], read: Callable[..., NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read images, (n, 1, height, width), and their labels, (n,), uint8 both, from two files."""
    images, labels = (read(path, ndim=ndim) for path, ndim in zip(paths, (3, 1), strict=True))
    for path, array in zip(paths, (images, labels), strict=True):
        if array.dtype != np.uint8:
            raise ValueError(f"{path}: elements of {array.dtype}, expected uint8")
    if len(images) != len(labels):
        raise ValueError(f"{paths[0]} has {len(images)} images, but {paths[1]} has {len(labels)} labels")
    return images[:, None], labels


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

    Local: every worker reads for itself, into memory (47 MB for Fashion-MNIST). Raises FileNotFoundError that names the
    missing files when `data_dir` is given and not complete, ValueError for a damaged file, UnsupportedError when there
    are no files and no scikit-learn.

    >>> data.load_images('.')
    Traceback (most recent call last):
    FileNotFoundError: images in .; missing: train-images-idx3-ubyte[.gz], ...
    """
    directory = DEBIAN_DIR if data_dir is None else Path(data_dir)
    try:
        paths = _files(directory, [_TRAIN, _TEST])
    except FileNotFoundError:
        if data_dir is None:
            return _digits()
        raise
    found = []
    for of_images, of_labels in (paths[:2], paths[2:]):
        x, y = _read((of_images, of_labels), read_idx)
        if x.shape[1:] != (1, 28, 28):
            raise ValueError(f"{of_images}: images of {x.shape[2:]} pixels; expected (28, 28)")
        if len(y) == 0:
            raise ValueError(f"{of_images} has no images")
        if y.max() > 9:
            raise ValueError(f"{of_labels}: labels from {y.min()} to {y.max()}; expected 0 to 9")
        found.append((x, y.astype(np.int64)))
    train, test = found
    return Images(*train, *test, f"{len(train[0])} training and {len(test[0])} test images from {directory}")


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
