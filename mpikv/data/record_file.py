"""`RecordFile` reads RecordIO files, or one worker's part of them; `RecordWriter` writes them.

Reading. Iterating reads on from record to record and needs no index. The number of records and the record at a place
are found by going through the heads of the part once (8 bytes of each record), or by an index file. In memory: one
record, 1 MiB while iterating, and 8 bytes (with an index file 16) for each record of the part once they are asked for.

Writing. The file takes its place when the writer is closed without an error, and until then a file that is there stays
as it was. An index that is there already goes just before, the new one comes just after: so there is never an index
that does not belong to the file beside it. In memory: one record, and its place in the index for each (some 120 bytes).
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpikv.common import checks
from mpikv.common.files import replacing
from mpikv.data import recordio
from mpikv.data.recordio import DamagedRecord, FileBytes, Index
from mpikv.data.split import bounds, check_part
from mpikv.runtime.abort import tells

AHEAD_BYTES = 1 << 20  # read at once while iterating


class RecordFile:
    """The records of one part of a RecordIO file, in the file's order: `len(r)`, `r[i]`, `for record in r`; bytes each.

    path: the file. index: None, or the path of its index file, or True for NAME.idx beside NAME.rec.
    num_parts >= 1, 0 <= part_index < num_parts: which part. Without an index the file is cut by bytes, exactly as
    MXNet's `ImageRecordIter` cuts it (see `recordio.byte_range`); with one, every part has equally many records,
    the first ones one more where they do not divide. Parts are disjoint and together the file; one may be empty.
    damaged: 'error' raises a ValueError with the `offset`; 'skip' goes on with the next good record: `skipped` counts,
    and `damages` lists the errors of, the places that were left out so far. To know how many records there are, 'skip'
    reads the whole part once.

    Local. Several threads may use it. Raises OSError where a file cannot be read, ValueError for an index that does not
    fit the file and where a damaged record is come to. An empty file has no records.

    >>> with data.RecordWriter('some.rec') as writer:
    ...     offsets = [writer.write(record) for record in (b'one', b'two', b'three')]
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
        damaged: Literal["error", "skip"] = "error",
    ) -> None:
        self.path = checks.path("path", path)
        self.num_parts, self.part_index = check_part(num_parts, part_index)
        self._skips = checks.one_of("damaged", damaged, ("error", "skip")) == "skip"
        self._damaged: dict[int, DamagedRecord] = {}
        self._index: Index | None = None
        self._offsets: NDArray[np.int64] | None = None
        self._file = FileBytes(self.path)
        self._begin = self._end = 0  # of the part, in bytes, where there is no index
        try:
            if index is None or index is False:
                self._begin, self._end = recordio.byte_range(self._file, self.num_parts, self.part_index)
            else:
                path = recordio.index_path(self.path) if index is True else checks.path("index", index)
                whole = recordio.read_index(path, self._file.size)
                mine = slice(*bounds(len(whole.offsets), self.num_parts, self.part_index))
                self._index = Index(whole.keys[mine].copy(), whole.offsets[mine].copy())  # the rest is let go
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._all_offsets())

    def __getitem__(self, i: int) -> bytes:
        return self._read(self._file, self.offset(i))[0]

    def __iter__(self) -> Iterator[bytes]:
        return (record for _, record in self._walk())

    def _walk(self) -> Iterator[tuple[int, bytes]]:
        file = self._file.ahead(AHEAD_BYTES)
        if self._index is not None:
            for offset in self._index.offsets.tolist():
                record, _ = self._good(file, offset)
                if record is not None:
                    yield offset, record
            return
        at = self._begin
        while at < self._end:
            offset = at
            record, at = self._good(file, offset)
            if record is not None:
                yield offset, record

    def _good(self, file: FileBytes, offset: int) -> tuple[bytes | None, int]:
        """A record, None for a damaged one that is skipped, and where the next one begins."""
        try:
            return self._read(file, offset)
        except DamagedRecord as error:
            if not self._skips:
                raise
            self._damaged[offset] = error.with_traceback(None)  # which would keep the bytes that were read
        return None, file.size if self._index is not None else recordio.next_head(file, offset + 4)

    def _read(self, file: FileBytes, offset: int) -> tuple[bytes, int]:
        try:
            return recordio.read_record(file, offset)
        except DamagedRecord as error:
            if self._index is None:
                raise
            raise DamagedRecord(error.path, offset, f"{error.problem} (or the index is of another file)") from None

    def _all_offsets(self) -> NDArray[np.int64]:
        if self._offsets is None:
            if self._skips:
                found = array("q", (offset for offset, _ in self._walk()))
            elif self._index is not None:
                found = array("q", self._index.offsets)
            else:
                found, at = array("q"), self._begin
                while at < self._end:
                    found.append(at)
                    at = recordio.after_record(self._file, at)
            self._offsets = np.array(found, dtype=np.int64)
        return self._offsets

    def offset(self, i: int) -> int:
        """Return where record `i` (from the end if negative) begins, in bytes. Raises IndexError.

        >>> with data.RecordWriter('some.rec') as writer:
        ...     offsets = [writer.write(record) for record in (b'one', b'four')]
        >>> data.RecordFile('some.rec').offset(-1)
        12
        """
        i, n = checks.whole("the number of a record", i, None), len(self)
        if not -n <= i < n:
            raise IndexError(f"{self.path}: record {i} of {n} in part {self.part_index} of {self.num_parts}")
        return int(self._all_offsets()[i])

    def keys(self) -> NDArray[np.int64]:
        """Return the key of each record in the index file: int64, (len(self),). Raises ValueError without one.

        Example: see the class.
        """
        if self._index is None:
            raise ValueError(f"{self.path} was opened without an index file, which has the keys; pass index=True")
        return self._index.keys[np.searchsorted(self._index.offsets, self._all_offsets())]

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
        """What was wrong at each damaged place, as errors in the order of the file. Example: see `skipped`."""
        return tuple(self._damaged[offset] for offset in sorted(self._damaged))

    def close(self) -> None:
        """Close the file. Reading afterwards raises ValueError. `with` does it, too.

        >>> data.RecordWriter('some.rec').close()
        >>> data.RecordFile('some.rec').close()
        """
        self._file.close()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RecordFile({self.path!r}, num_parts={self.num_parts}, part_index={self.part_index})"


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
            self._index: str | None = recordio.index_path(self.path)
        else:
            self._index = None if index is False or index is None else checks.path("index", index)
        if self._index is not None and os.path.realpath(self._index) == os.path.realpath(self.path):
            raise ValueError(f"the index file would be {self.path} itself; name it with index=, or pass index=False")
        self._keys: dict[int, int] = {}  # the offset of each
        self._length = self._at = 0
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
        text = recordio.encoded(data)
        if self._index is not None:
            key = self._length if key is None else checks.whole("key", key, -checks.LARGEST)
            if key in self._keys:
                raise ValueError(f"{self.path}: key {key} was given to another record already")
            self._keys[key] = self._at
        try:
            self._file.write(text)
        except OSError as problem:
            self._abandon()
            problem.filename = self.path
            raise
        offset = self._at
        self._length, self._at = self._length + 1, self._at + len(text)
        return offset

    def __len__(self) -> int:
        """Return how many records were written."""
        return self._length

    def close(self) -> None:
        """Put the file and its index in their places. A second call does nothing.

        >>> writer = data.RecordWriter('some.rec', index=False)
        >>> offset = writer.write(b'one')
        >>> writer.close()
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
            recordio.write_index(self._index, self._keys.items())

    def _abandon(self) -> None:
        """Remove what was written. `replacing` does not see the block's own error, in which it would put its file."""
        self._place.__exit__(Exception, Exception(), None)
