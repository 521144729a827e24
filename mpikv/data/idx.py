"""IDX files: MNIST's format of arrays.

A file is two zero bytes, a byte for the type of the elements, a byte for the number of axes, the length of each
axis as a big-endian unsigned 32-bit integer, then the elements in C order, big-endian. It may be packed with gzip,
which is seen from its first two bytes, not from the name. Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST
database", section on the file format.

`read_idx` reads the whole file: memory is twice the array for a moment where it is packed. `open_idx` maps it.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mpikv.common import checks
from mpikv.common.files import open_regular
from mpikv.data.parts import bounds, check_part
from mpikv.runtime.abort import tells

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"
_LONGEST_HEADER = 4 + 4 * 255
_PIECE_BYTES = 1 << 20


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

    num_parts >= 1, 0 <= part_index < num_parts: take one piece of it along the first axis, see parts.py. ndim and
    errors: as of `read_idx`. Local.

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
    return np.memmap(name, dtype, "r", start, shape)


def _unpacked(path: Any, file: IO[bytes], ndim: int | None) -> bytearray:
    """Return what is packed in the file, but at most a byte more than its header says: a small file may hold much."""
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            raw = bytearray(stream.read(_LONGEST_HEADER))
            start, shape, dtype = _header(path, raw, len(raw), ndim)
            most = start + math.prod(shape) * dtype.itemsize + 1
            # Piece by piece: of a damaged header's length nothing is allocated before it is there.
            while len(raw) < most and (piece := stream.read(min(_PIECE_BYTES, most - len(raw)))):
                raw += piece
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
