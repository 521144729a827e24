"""`RecordFile` reads RecordIO files, or one worker's part of them; `RecordWriter` writes them.

Reading. Iterating reads on from record to record and needs no index. The number of records and the record at a place
are found by going through the heads of the part once (8 bytes of each record), or by an index file. In memory: one
record, 1 MiB while iterating, and 8 bytes (with an index file 16) for each record of the part once they are asked for.

Writing. The file takes its place when the writer is closed without an error, and until then a file that is there stays
as it was. An index that is there already goes just before, the new one comes just after: so there is never an index
that does not belong to the file beside it. In memory: one record, and 16 bytes for each record's place in the index
(120 where keys do not grow).
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpikv.common import checks
from mpikv.common.files import replacing
from mpikv.data.datasets import bounds, check_part
from mpikv.data.recordio import (
    DamagedRecord,
    FileBytes,
    Index,
    after_record,
    byte_range,
    encoded,
    index_path,
    next_head,
    read_index,
    read_record,
    write_index,
)
from mpikv.runtime.abort import tells

Damaged = Literal["error", "skip"]
_DAMAGED: tuple[Damaged, ...] = ("error", "skip")
AHEAD_BYTES = 1 << 20  # read at once while iterating


class RecordFile:
    """The records of one part of a RecordIO file, in the file's order: `len(r)`, `r[i]`, `for record in r`; bytes each.

    path: the file. index: None, or the path of its index file, or True for NAME.idx beside NAME.rec.
    num_parts >= 1, 0 <= part_index < num_parts: which part. Without an index the file is cut by bytes, exactly as
    MXNet's `ImageRecordIter` cuts it (see `recordio.byte_range`); with one, every part has equally many records,
    the first ones one more where they do not divide. Parts are disjoint and together the file; one may be empty.
    damaged: 'error' raises DamagedRecord with the offset; 'skip' goes on with the next good record. To know how many
    there are, 'skip' reads the whole part once.

    Local. Several threads may use it. Raises OSError where a file cannot be read, ValueError for an index that does not
    fit the file, DamagedRecord (a ValueError) when a damaged record is come to. An empty file has no records.

    >>> data.write_records('some.rec', [b'one', b'two', b'three'])
    3
    >>> with data.RecordFile('some.rec', index=True) as records:
    ...     records[-1], len(records), list(records), records.keys().tolist()
    (b'three', 3, [b'one', b'two', b'three'], [0, 1, 2])
    """

    @tells
    def __init__(
        self,
        path: Any,
        *,
        index: Any = None,
        num_parts: int = 1,
        part_index: int = 0,
        damaged: Damaged = "error",
    ) -> None:
        self.path = checks.path("path", path)
        self.num_parts, self.part_index = check_part(num_parts, part_index)
        checks.one_of("damaged", damaged, _DAMAGED)
        self._skips = damaged == "skip"
        self._damaged: dict[int, DamagedRecord] = {}
        self._file = FileBytes(self.path)
        self._index: Index | None = None
        self._offsets: NDArray[np.int64] | None = None
        try:
            if index is None or index is False:
                self.begin, self.end = byte_range(self._file, self.num_parts, self.part_index)
            else:
                index = index_path(self.path) if index is True else checks.path("index", index)
                self._take_index(index)
        except BaseException:
            self._file.close()
            raise

    def _take_index(self, index: str) -> None:
        whole = read_index(index, self._file.size)
        first, last = bounds(len(whole.offsets), self.num_parts, self.part_index)
        self.begin, self.end = (
            int(whole.offsets[i]) if i < len(whole.offsets) else self._file.size for i in (first, last)
        )
        # Copies, so that the rest of the index is let go.
        self._index = Index(whole.keys[first:last].copy(), whole.offsets[first:last].copy())
        if not self._skips:
            self._offsets = self._index.offsets

    def __len__(self) -> int:
        return len(self.offsets())

    def __getitem__(self, i: int) -> bytes:
        return self._read(self._file, self.offset(i))[0]

    def __iter__(self) -> Iterator[bytes]:
        for _, record in self.walk():
            yield record

    def walk(self) -> Iterator[tuple[int, bytes]]:
        """Yield each record's offset and its bytes, in order.

        >>> n_records = data.write_records('some.rec', [b'one', b'four'])
        >>> list(data.RecordFile('some.rec').walk())
        [(0, b'one'), (12, b'four')]
        """
        file = self._file.ahead(AHEAD_BYTES)
        if self._index is not None:
            yield from self._at_offsets(file, self._index.offsets)
            return
        at = self.begin
        while at < self.end:
            offset = at
            try:
                record, at = self._read(file, offset)
            except DamagedRecord as error:
                self._note(error)
                at = next_head(file, offset + 4)
            else:
                yield offset, record

    def offset(self, i: int) -> int:
        """Return where record `i` (from the end if negative) begins, in bytes. Raises IndexError.

        >>> n_records = data.write_records('some.rec', [b'one', b'four'])
        >>> data.RecordFile('some.rec').offset(-1)
        12
        """
        i, n = checks.whole("the number of a record", i, None), len(self)
        if not -n <= i < n:
            raise IndexError(f"{self.path}: record {i} of {n} in part {self.part_index} of {self.num_parts}")
        return int(self.offsets()[i])

    def offsets(self) -> NDArray[np.int64]:
        """Return where each record of the part begins: int64, (len(self),), not to be written to.

        >>> n_records = data.write_records('some.rec', [b'one', b'four'])
        >>> data.RecordFile('some.rec').offsets()
        array([ 0, 12])
        """
        if self._offsets is None:
            self._offsets = self._find_offsets()
        return self._offsets

    def keys(self) -> NDArray[np.int64]:
        """Return the key of each record in the index file: int64, (len(self),).

        Raises ValueError without an index file.

        >>> n_records = data.write_records('some.rec', [b'one', b'four'])
        >>> data.RecordFile('some.rec', index=True).keys()
        array([0, 1])
        """
        if self._index is None:
            raise ValueError(f"{self.path} was opened without an index file, which has the keys; pass index=True")
        places = np.searchsorted(self._index.offsets, self.offsets())
        return self._index.keys[places]

    @property
    def skipped(self) -> int:
        """How many damaged places `damaged='skip'` has come to so far. One place may have been more than one record.

        >>> n_bytes = open('bad.rec', 'wb').write(b'this is no record file, ')
        >>> records = data.RecordFile('bad.rec', damaged='skip')
        >>> list(records), records.skipped, records.damages[0].offset
        ([], 1, 0)
        """
        return len(self._damaged)

    @property
    def damages(self) -> tuple[DamagedRecord, ...]:
        """What was wrong at each damaged place, as DamagedRecord errors in the order of the file.

        Example: see `skipped`.
        """
        return tuple(self._damaged[offset] for offset in sorted(self._damaged))

    def close(self) -> None:
        """Close the file. Reading afterwards raises ValueError.

        >>> n_records = data.write_records('some.rec', [b'one'])
        >>> data.RecordFile('some.rec').close()
        """
        self._file.close()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RecordFile({self.path!r}, num_parts={self.num_parts}, part_index={self.part_index})"

    def _find_offsets(self) -> NDArray[np.int64]:
        found = array("q")
        if self._skips:
            found.extend(offset for offset, _ in self.walk())
        else:
            at = self.begin
            while at < self.end:
                found.append(at)
                at = after_record(self._file, at)
        return np.array(found, dtype=np.int64)

    def _at_offsets(self, file: FileBytes, offsets: NDArray[np.int64]) -> Iterator[tuple[int, bytes]]:
        for offset in map(int, offsets):
            try:
                record, _ = self._read(file, offset)
            except DamagedRecord as error:
                self._note(error)
            else:
                yield offset, record

    def _read(self, file: FileBytes, offset: int) -> tuple[bytes, int]:
        try:
            return read_record(file, offset)
        except DamagedRecord as error:
            if self._index is None:
                raise
            raise DamagedRecord(error.path, offset, f"{error.problem} (or the index is of another file)") from None

    def _note(self, error: DamagedRecord) -> None:
        if not self._skips:
            raise error
        self._damaged[error.offset] = error.with_traceback(None)  # which would keep the bytes that were read


class RecordWriter:
    """Writes records to the file `path`, for use with `with`: an error in the block leaves what was there before.

    index: True writes NAME.idx beside NAME.rec, a path writes there, False writes none (and leaves NAME.idx alone).
    Local, one thread. Raises OSError where a file cannot be written.

    >>> with data.RecordWriter('some.rec') as writer:
    ...     writer.write(b'one'), writer.write(b'four', key=7)
    (0, 12)
    """

    @tells
    def __init__(self, path: Any, *, index: Any = True) -> None:
        self.path = checks.path("path", path)
        if index is True:
            self._index: str | None = index_path(self.path)
        else:
            self._index = None if index is False or index is None else checks.path("index", index)
        if self._index is not None and os.path.realpath(self._index) == os.path.realpath(self.path):
            raise ValueError(f"the index file would be {self.path} itself; name it with index=, or pass index=False")
        self._keys = array("q")
        self._seen: set[int] | None = None
        self._offsets = array("q")
        self._at = 0
        self._place = ExitStack()
        self._file = self._place.enter_context(replacing(self.path))

    def write(self, record: Any, key: int | None = None) -> int:
        """Append one record: bytes, or anything with a buffer. Returns its offset, in bytes.

        key: its number in the index, by default how many records there are before it. Raises ValueError for a key that
        was there already, for a record of 2**29 bytes or more, and after `close`.
        """
        if self._file.closed:
            raise ValueError(f"{self.path} was closed; nothing more can be written to it")
        try:
            data = bytes(memoryview(record))
        except TypeError:
            raise checks.wrong("record", "bytes", record) from None
        text = encoded(data)
        if self._index is not None:
            self._keys.append(self._new_key(key))
        try:
            self._file.write(text)
        except OSError as problem:
            self._abandon()
            problem.filename = self.path
            raise
        self._offsets.append(self._at)
        self._at += len(text)
        return self._offsets[-1]

    def _new_key(self, key: int | None) -> int:
        key = len(self._offsets) if key is None else checks.whole("key", key, -checks.LARGEST)
        highest = self._keys[-1] if self._keys else key - 1
        if self._seen is None and key <= highest:  # keys that grow are all different
            self._seen = set(self._keys)
        if self._seen is not None:
            if key in self._seen:
                raise ValueError(f"{self.path}: key {key} was given to another record already")
            self._seen.add(key)
        return key

    def __len__(self) -> int:
        """Return how many records were written."""
        return len(self._offsets)

    def close(self) -> None:
        """Put the file and its index in their places. A second call does nothing.

        >>> writer = data.RecordWriter('some.rec', index=False)
        >>> offset = writer.write(b'one')
        >>> writer.close()
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file.closed:
            return
        if error is not None:
            self._abandon()
            return
        if self._index is not None:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._index)
        self._place.close()
        if self._index is not None:
            write_index(self._index, zip(self._keys, self._offsets, strict=True))

    def _abandon(self) -> None:
        """Remove what was written. `replacing` does not see the block's own error, in which it would put its file."""
        with contextlib.suppress(_AbandonedError):
            self._place.__exit__(_AbandonedError, _AbandonedError(), None)


class _AbandonedError(Exception):
    """Ends the block of `replacing` without its file."""


def write_records(path: Any, records: Iterable[Any], *, index: Any = True) -> int:
    """Write all `records` to the file and return how many they are. path, index: as of RecordWriter. Local.

    >>> data.write_records('some.rec', [b'one', b'two'])
    2
    """
    with RecordWriter(path, index=index) as writer:
        for record in records:
            writer.write(record)
        return len(writer)
