"""Records from one rank of a host to another, through a ring in the memory that they share.

One rank writes, one reads. The writer puts a record behind the last one and then moves `HEAD`, which only it writes;
the reader takes all records up to there and then moves `TAIL`, which only it writes. Both count bytes since the start.
A record is four numbers and a payload, and is never cut: where it does not fit before the ring's end, a record of kind
`_GAP` fills the rest, and the record goes to the ring's beginning.

Cost: two or three microseconds of Python for each record; besides the record the reader reads one cache line, `HEAD`'s.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from mpikv.hostmemory.segment import ALIGN_BYTES, ORDERED, WORD_BYTES, HostMemory, fence

RING_BYTES = 1 << 19
RECORD_BYTES = 32  # all records begin at a multiple of it
HEAD, TAIL = 0, ALIGN_BYTES // WORD_BYTES  # words, in cache lines of their own
CONTROL_BYTES = 2 * ALIGN_BYTES
STRIDE_BYTES = CONTROL_BYTES + RING_BYTES
LONGEST_BYTES = 1 << 17  # of a record's payload: several fit, so that writing and reading overlap

_RECORD = struct.Struct("<IIQQQ")  # payload bytes, kind, three numbers
_GAP = 0  # the kind of what fills the ring up to its end
_NO_BYTES = memoryview(b"")

Handle = Callable[[int, int, int, int, memoryview], None]  # kind, three numbers, payload (valid during the call)


class _Ring:
    def __init__(self, memory: HostMemory, begin_bytes: int) -> None:
        self._words = memory.words(begin_bytes, CONTROL_BYTES // WORD_BYTES)
        self._data = memory.words(begin_bytes + CONTROL_BYTES, RING_BYTES // WORD_BYTES).cast("B")


class RingWriter(_Ring):
    def __init__(self, memory: HostMemory, begin_bytes: int) -> None:
        super().__init__(memory, begin_bytes)
        self._head = self._tail = 0

    def put(self, kind: int, a: int, b: int, c: int, payload: memoryview | bytes | None) -> bool:
        """Write one record; returns False where it does not fit now. kind: not 0. payload: at most LONGEST_BYTES."""
        n_bytes = 0 if payload is None else len(payload)
        size = RECORD_BYTES + (n_bytes + RECORD_BYTES - 1 & -RECORD_BYTES)
        at = self._head % RING_BYTES
        gap = RING_BYTES - at if at + size > RING_BYTES else 0
        if self._head + gap + size - self._tail > RING_BYTES:
            self._tail = self._words[TAIL]
            if self._head + gap + size - self._tail > RING_BYTES:
                return False
        if gap:
            _RECORD.pack_into(self._data, at, 0, _GAP, 0, 0, 0)
            self._head += gap
            at = 0
        _RECORD.pack_into(self._data, at, n_bytes, kind, a, b, c)
        if n_bytes:
            begin = at + RECORD_BYTES
            self._data[begin : begin + n_bytes] = payload  # type: ignore[assignment]
        self._head += size
        if not ORDERED:
            fence()
        self._words[HEAD] = self._head
        return True


class RingReader(_Ring):
    def __init__(self, memory: HostMemory, begin_bytes: int) -> None:
        super().__init__(memory, begin_bytes)
        self._tail = 0

    @property
    def waiting(self) -> bool:
        return self._words[HEAD] != self._tail

    def take(self, handle: Handle) -> bool:
        """Call `handle` with every record that is there; returns whether there was one."""
        head = self._words[HEAD]
        if head == self._tail:
            return False
        if not ORDERED:
            fence()
        data = self._data
        try:
            while self._tail != head:
                at = self._tail % RING_BYTES
                n_bytes, kind, a, b, c = _RECORD.unpack_from(data, at)
                if kind == _GAP:
                    self._tail += RING_BYTES - at
                    continue
                self._tail += RECORD_BYTES + (n_bytes + RECORD_BYTES - 1 & -RECORD_BYTES)
                begin = at + RECORD_BYTES
                handle(kind, a, b, c, data[begin : begin + n_bytes] if n_bytes else _NO_BYTES)
        finally:
            if not ORDERED:
                fence()
            self._words[TAIL] = self._tail
        return True


def rings_bytes(size: int) -> int:
    """Return how many bytes the rings between all pairs of `size` ranks take; unused ones take no memory."""
    return size * size * STRIDE_BYTES


def ring_begin(begin_bytes: int, size: int, source: int, dest: int) -> int:
    """Return where the ring from `source` to `dest` begins; the first ring begins at `begin_bytes`."""
    return begin_bytes + (source * size + dest) * STRIDE_BYTES
