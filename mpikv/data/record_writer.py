"""`RecordWriter`: writes a RecordIO file and its index file, whole or not at all.

The file takes its place when the writer is closed without an error, and until then a file that is there stays as it
was. An index that is there already goes just before, the new one comes just after: so there is never an index that does
not belong to the file beside it. In memory: one record, and 16 bytes for each record's place in the index (120 where
keys do not grow).
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from mpikv.common import checks
from mpikv.common.files import replacing
from mpikv.data.record_index import index_path, write_index
from mpikv.data.recordio import encoded
from mpikv.runtime.abort import tells


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
