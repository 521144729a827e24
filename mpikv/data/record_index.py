"""Index files of RecordIO: a line for each record, its key, a tab, and the offset of its beginning in bytes.

MXNet's `MXIndexedRecordIO` and `im2rec` write them as NAME.idx beside NAME.rec. Here they are read and written with
whole numbers as keys, as MXNet's own `ImageRecordIter` needs them. In memory: 16 bytes for each record.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpikv.common.checks import shown
from mpikv.common.files import open_regular, replace_file


class Index(NamedTuple):
    """The records in the order of the file. keys, offsets: int64, (n,)."""

    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]


def index_path(path: str) -> str:
    """Return NAME.idx for NAME.rec."""
    return os.path.splitext(path)[0] + ".idx"


def read_index(path: str, size_bytes: int) -> Index:
    """Read an index file, and sort it by offset. size_bytes: of the file of records.

    Raises OSError, and ValueError that names file and line for what is no key and offset, for a key or an offset that
    comes twice, and for offsets that cannot be a record's beginning.
    """
    keys, offsets = array("q"), array("q")
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            words = line.split()
            if not words:
                continue
            try:
                key, offset = map(int, words)
                keys.append(key)
                offsets.append(offset)
            except (ValueError, OverflowError):
                raise ValueError(
                    f"{path}, line {number}: {shown(line)}; expected a key and an offset, two whole numbers"
                ) from None
            if offset % 4 or not 0 <= offset <= size_bytes - 8:
                raise ValueError(
                    f"{path}, line {number}: key {key} has offset {offset}; expected a multiple of 4 with a record "
                    f"behind it in a file of {size_bytes} bytes: the index is damaged, or of another file"
                )
    if not keys and size_bytes:
        raise ValueError(f"{path}: an empty index, of a file of {size_bytes} bytes")
    order = np.argsort(np.frombuffer(offsets, np.int64), kind="stable") if keys else np.empty(0, np.int64)
    found = Index(np.array(keys, np.int64)[order], np.array(offsets, np.int64)[order])
    for what, values in (("key", np.sort(found.keys)), ("offset", found.offsets)):
        twice = np.flatnonzero(values[1:] == values[:-1])
        if len(twice):
            raise ValueError(f"{path}: {what} {values[twice[0]]} comes twice")
    return found


def write_index(path: str, entries: Iterable[tuple[int, int]]) -> None:
    """Write keys and offsets into an index file, whole or not at all."""
    replace_file(path, lambda file: file.writelines(b"%d\t%d\n" % entry for entry in entries))
