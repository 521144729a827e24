"""RecordIO: the form of MXNet's `.rec` files, one record at a time, and of their index files.

A record is a head, its bytes and zeros up to the next multiple of 4. The head is the magic word 0xced7230a and a word
of which the upper 3 bits are a flag and the lower 29 the number of bytes; both little-endian. Where a record's bytes
have the magic word at a multiple of 4 from their beginning, the writer cuts there and leaves the word out: the pieces
have heads of their own, with the flags 1 (first), 2 (middle) and 3 (last) instead of 0 (whole), and the reader puts the
word back between them. So a magic word at a multiple of 4 in a file is a head and nothing else, and a reader can
begin anywhere.

A record is good if its heads and lengths fit, no head lies within a piece, and another head or the end of the file
follows. The form has no checksum: other damage within the bytes of a record is not seen here.

Source of the form: dmlc-core, include/dmlc/recordio.h; checked against the files that MXNet 1.9.1 writes and reads.

An index file, NAME.idx beside NAME.rec, has a line for each record: its key, a tab, and the offset of its beginning in
bytes. MXNet's `MXIndexedRecordIO` and `im2rec` write them. Here they are read and written with whole numbers as keys,
as MXNet's own `ImageRecordIter` needs them. In memory: 16 bytes for each record.
"""

from __future__ import annotations

import copy
import os
import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpikv.common.checks import shown
from mpikv.common.files import open_regular, replacing
from mpikv.errors import MpikvError

MAGIC = struct.pack("<I", 0xCED7230A)
WHOLE, FIRST, MIDDLE, LAST = range(4)
LONGEST = 2**29 - 1  # bytes of a record: the length has 29 bits
HEAD_BYTES = 8
# Read at once where a head is looked for. In a damaged file every few bytes may look like a head of a long record, so a
# search reads little more than what lies before the next one: small blocks first.
_FIRST_BLOCK, _LARGEST_BLOCK = 1 << 10, 1 << 20
_FLAGS = {WHOLE: "a whole record", FIRST: "a first piece", MIDDLE: "a middle piece", LAST: "a last piece"}


class DamagedRecord(MpikvError, ValueError):  # noqa: N818 - reads like its siblings
    """A record that cannot be read. path: of the file. offset: where the record begins, in bytes."""

    def __init__(self, path: str, offset: int, problem: str) -> None:
        super().__init__(path, offset, problem)
        self.path, self.offset, self.problem = path, offset, problem

    def __str__(self) -> str:
        return f"{self.path}: damaged record at offset {self.offset}: {self.problem}"


class FileBytes:
    """The bytes of a file, by their place. Several threads may read, and forked processes too.

    Raises OSError, also for anything but a regular file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: IO[bytes] = open_regular(path)
        self.size = os.fstat(self._file.fileno()).st_size
        self._ahead = 0
        self._kept = b""
        self._kept_from = 0

    def ahead(self, count: int) -> FileBytes:
        """The same open file for one reader that goes through it in order: `count` bytes are read at once and kept."""
        other = copy.copy(self)
        other._ahead = count  # noqa: SLF001 - of the same class
        return other

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on, fewer at the end of the file."""
        if not self._ahead or self._file.closed:
            return self._read(offset, count)
        start = offset - self._kept_from
        if start < 0 or start + count > len(self._kept):
            self._kept, self._kept_from, start = self._read(offset, max(count, self._ahead)), offset, 0
        return self._kept[start : start + count]

    def _read(self, offset: int, count: int) -> bytes:
        if self._file.closed:
            raise ValueError(f"{self.path} was closed")
        found = os.pread(self._file.fileno(), count, offset)
        while len(found) < min(count, self.size - offset):  # a file system may give less than it has
            more = os.pread(self._file.fileno(), count - len(found), offset + len(found))
            if not more:
                break
            found += more
        return found

    def close(self) -> None:
        """Close the file; reading raises ValueError afterwards."""
        self._file.close()


def encoded(record: bytes) -> bytes:
    """The record as it stands in a file, with heads and zeros. Raises ValueError where it is too long."""
    if len(record) > LONGEST:
        raise ValueError(f"a record of {len(record)} bytes; RecordIO takes up to {LONGEST}")
    cuts = list(_aligned(record))
    if not cuts:
        return b"".join((_head(WHOLE, len(record)), record, bytes(-len(record) % 4)))
    starts, ends = [0, *(cut + 4 for cut in cuts)], [*cuts, len(record)]
    pieces = []
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        flag = FIRST if i == 0 else LAST if i == len(cuts) else MIDDLE
        pieces += [_head(flag, end - start), record[start:end]]
    return b"".join((*pieces, bytes(-len(record) % 4)))


def read_record(file: FileBytes, offset: int) -> tuple[bytes, int]:
    """The bytes of the record at `offset`, and where what follows it begins. Raises DamagedRecord."""
    pieces = [(_read_piece(file, offset, begin, length), end) for begin, length, end in _pieces(file, offset)]
    _check_follows(file, offset, pieces[-1][1])
    return MAGIC.join(piece for piece, _ in pieces), pieces[-1][1]


def after_record(file: FileBytes, offset: int) -> int:
    """Where what follows the record at `offset` begins; of its bytes only the heads are read. Raises DamagedRecord."""
    *_, (_, _, end) = _pieces(file, offset)
    _check_follows(file, offset, end)
    return end


def _pieces(file: FileBytes, offset: int) -> Iterator[tuple[int, int, int]]:
    """Of each piece of the record at `offset`: where its bytes begin, how many they are, and where the next head is."""
    at, flag = offset, FIRST
    while flag not in (WHOLE, LAST):
        flag, length = _read_head(file, offset, at)
        begin, at = at + HEAD_BYTES, at + HEAD_BYTES + length + -length % 4
        yield begin, length, at


def next_head(file: FileBytes, offset: int) -> int:
    """Where the first record begins at `offset`, rounded up to a multiple of 4, or after it; else the file's size."""
    for at, block in _blocks(file, offset + -offset % 4, file.size):
        for place in _aligned(block):
            head = file.read(at + place, HEAD_BYTES)
            if len(head) < HEAD_BYTES or struct.unpack("<I", head[4:])[0] >> 29 in (WHOLE, FIRST):
                return at + place
    return file.size


def byte_range(file: FileBytes, num_parts: int, part_index: int) -> tuple[int, int]:
    """Where the first record of a part begins and its last one ends: the parts of MXNet's `ImageRecordIter`.

    The file is cut every `ceil(size / num_parts)` bytes, rounded up to a multiple of 4, and each cut moves on to the
    next record's beginning. So the parts are disjoint and together the file; a part may be empty.
    Source: dmlc-core, src/io/input_split_base.cc (ResetPartition); compared with what MXNet 1.9.1 reads.
    """
    step = -(-file.size // num_parts)
    step += -step % 4
    begin, end = (min(step * i, file.size) for i in (part_index, part_index + 1))
    if begin == end:
        return begin, begin
    # The beginning of the file is one of a record, if it is good, and what is there belongs to the first part in any
    # case, so that damage there is found.
    return next_head(file, begin) if begin else 0, next_head(file, end)


def _aligned(data: bytes) -> Iterator[int]:
    """Where the magic word is at multiples of 4. Looks no further than it is asked for."""
    at = data.find(MAGIC)
    while at >= 0:
        if at % 4 == 0:
            yield at
        at = data.find(MAGIC, at + 1)  # the word does not overlap itself, but one more is simplest


def _blocks(file: FileBytes, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The bytes from `begin` to `end`, in blocks with their places, each twice as long as the one before."""
    at, size = begin, _FIRST_BLOCK
    while at < end:
        yield at, file.read(at, min(size, end - at))
        at += size
        size = min(2 * size, _LARGEST_BLOCK)


def _read_piece(file: FileBytes, offset: int, begin: int, length: int) -> bytes:
    """The bytes of a piece of the record at `offset`. Raises DamagedRecord, also for a head within them."""
    blocks = []
    for at, block in _blocks(file, begin, begin + length):
        inside = next(_aligned(block), None)
        if inside is not None:
            raise DamagedRecord(
                file.path, offset, f"another record's head lies in it, at {at + inside}: its length {length} is wrong"
            )
        blocks.append(block)
    piece = b"".join(blocks)
    if len(piece) < length:
        raise DamagedRecord(file.path, offset, "the file was cut short while it was read")
    return piece


def _head(flag: int, length: int) -> bytes:
    return MAGIC + struct.pack("<I", flag << 29 | length)


def _read_head(file: FileBytes, offset: int, at: int) -> tuple[int, int]:
    head = file.read(at, HEAD_BYTES)
    where = "" if at == offset else f"; the piece at {at}"
    if len(head) < HEAD_BYTES:
        raise DamagedRecord(file.path, offset, f"truncated: the file ends at {file.size}, within a head{where}")
    if head[:4] != MAGIC:
        found, wanted = head[:4].hex(" "), MAGIC.hex(" ")
        raise DamagedRecord(file.path, offset, f"no RecordIO head: {found} instead of {wanted}{where}")
    word = struct.unpack("<I", head[4:])[0]
    flag, length = word >> 29, word & LONGEST
    expected = (WHOLE, FIRST) if at == offset else (MIDDLE, LAST)
    if flag not in expected:
        found = _FLAGS.get(flag, "unknown")
        words = " or ".join(_FLAGS[one] for one in expected)
        raise DamagedRecord(file.path, offset, f"flag {flag} ({found}) where {words} is expected{where}")
    end = at + HEAD_BYTES + length + -length % 4
    if end > file.size:
        raise DamagedRecord(
            file.path, offset, f"truncated: its {length} bytes would end at {end}, the file ends at {file.size}{where}"
        )
    return flag, length


def _check_follows(file: FileBytes, offset: int, at: int) -> None:
    if at < file.size and file.read(at, 4) != MAGIC:
        raise DamagedRecord(
            file.path, offset, f"no record follows it at {at}, so its length or the head there is damaged"
        )


# --- index files


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
    with replacing(path) as file:
        file.writelines(b"%d\t%d\n" % entry for entry in entries)
