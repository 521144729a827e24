"""Device memory that a store uses again and again.

The driver gives memory in chunks; arrays take parts of them, and what is let go of is kept for the next array of such a
length. For giving memory back to CUDA waits for the whole device, and another process of the host can open a chunk once
and for all (`Driver.export` names whole allocations). Parts begin at multiples of 512 bytes.

Memory may be let go of while work on it is still under way in the store's stream. Whoever takes it for work in that
same stream need not care; work in another stream has to come after `Memory.after`.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mpikv.spaces.driver import Driver, Event

ALIGN_BYTES = 512  # as cudaMalloc aligns at least 256; whole cache lines for everybody
CHUNK_BYTES = 32 << 20  # a longer array has a chunk of its own


class Chunk:
    """Consecutive device memory. number: counts a store's allocations from 0.

    free: called with its address when the last reference to it is gone; None: nothing is.
    """

    __slots__ = ("address", "free", "n_bytes", "number")

    def __init__(self, number: int, address: int, n_bytes: int) -> None:
        self.number, self.address, self.n_bytes = number, address, n_bytes
        self.free: Callable[[int], None] | None = None

    def __del__(self) -> None:
        if self.free is not None and not sys.is_finalizing():  # then the process gives everything back
            self.free(self.address)


class Memory:
    """Part of a chunk, which goes back to its pool with the last reference to it.

    after: work in other streams than the store's has to come after it; None: nothing is under way. written: the last
    write that another stream has begun, which work in the store's stream has to come after.
    """

    __slots__ = ("__weakref__", "_give", "address", "after", "chunk", "n_bytes", "written")

    def __init__(
        self, chunk: Chunk, address: int, n_bytes: int, after: Event | None, give: Callable[[Memory], None]
    ) -> None:
        self.chunk, self.address, self.n_bytes = chunk, address, n_bytes
        self.after, self.written = after, None
        self._give = give

    def __del__(self) -> None:
        self._give(self)


class _Free(NamedTuple):
    chunk: Chunk
    address: int
    after: Event | None


class Pool:
    """Memory of one store on one GPU.

    stream: the store's own, in which memory is used. numbers: of the chunks; those of a store's pools are different.
    """

    def __init__(self, driver: Driver, stream: int, numbers: Iterator[int] | None = None) -> None:
        self._driver, self._stream = driver, stream
        self._numbers = itertools.count() if numbers is None else numbers
        self._lock = threading.Lock()
        self.chunks: list[Chunk] = []
        self._free: dict[int, list[_Free]] = defaultdict(list)  # by length
        self._rest: tuple[Chunk, int] | None = None  # the last chunk that is not full, and where its free end begins
        # A deque, since memory may be let go of at any moment, in any thread, also while the lock is held.
        self._returned: deque[tuple[Chunk, int, int, Event | None]] = deque()
        self._closed = False

    @property
    def held_bytes(self) -> int:
        """Device memory that this store holds."""
        return sum(chunk.n_bytes for chunk in self.chunks)

    def take(self, n_bytes: int) -> Memory:
        """Memory of any content. Raises OutOfDeviceMemory."""
        length = _rounded(n_bytes)
        with self._lock:
            self._sort_returned()
            kept = self._free[length]
            if kept:
                chunk, address, after = kept.pop()
                if after is not None and self._driver.done(after):
                    after = None
                return Memory(chunk, address, length, after, self._give)
            chunk, address = self._carve(length)
            return Memory(chunk, address, length, None, self._give)

    def _carve(self, length: int) -> tuple[Chunk, int]:
        if length > CHUNK_BYTES // 2:
            chunk = self._allocate(length)
            return chunk, chunk.address
        if self._rest is None or self._rest[0].address + self._rest[0].n_bytes - self._rest[1] < length:
            chunk = self._allocate(CHUNK_BYTES)
            self._rest = chunk, chunk.address
        chunk, address = self._rest
        self._rest = chunk, address + length
        return chunk, address

    def _allocate(self, n_bytes: int) -> Chunk:
        chunk = Chunk(next(self._numbers), self._driver.allocate(n_bytes), n_bytes)
        self.chunks.append(chunk)
        return chunk

    def _give(self, memory: Memory) -> None:
        if self._closed:
            return
        self._returned.append((memory.chunk, memory.address, memory.n_bytes, memory.written))

    def _sort_returned(self) -> None:
        """Keep what has come back. An event that is later than the last use of it all is as good as an exact one."""
        after = None
        while self._returned:
            chunk, address, length, written = self._returned.popleft()
            if written is not None:
                self._driver.wait(self._stream, written)
                after = None
            if after is None:
                after = self._driver.record(self._stream)
            self._free[length].append(_Free(chunk, address, after))

    def find(self, address: int, n_bytes: int) -> Chunk | None:
        """The chunk that these bytes lie in; None where they are not this store's."""
        for chunk in self.chunks:
            if chunk.address <= address and address + n_bytes <= chunk.address + chunk.n_bytes:
                return chunk
        return None

    def part(self, chunk: Chunk, address: int, n_bytes: int) -> Memory:
        """Bytes of a chunk that somebody else has taken and keeps."""
        return Memory(chunk, address, n_bytes, None, lambda _memory: None)

    def close(self) -> None:
        """Give all chunks back. Nothing may be under way; arrays in them are of no use from now on."""
        for chunk in self._end():
            self._driver.free(chunk.address)

    def leave(self) -> None:
        """Let go of all chunks: each is given back with the last array that is in it."""
        for chunk in self._end():
            chunk.free = self._driver.free

    def _end(self) -> list[Chunk]:
        with self._lock:
            self._closed = True
            chunks, self.chunks, self._rest = self.chunks, [], None
            self._free.clear()
            self._returned.clear()
            return chunks


def _rounded(n_bytes: int) -> int:
    """A length that others ask for, too: an eighth of a power of two more at most."""
    step = max(ALIGN_BYTES, 1 << max(0, n_bytes.bit_length() - 4))
    return max(ALIGN_BYTES, -(-n_bytes // step) * step)
