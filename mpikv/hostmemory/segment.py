"""Memory that the ranks of one host share.

It is one file without a name (memfd), made by the first rank and opened by the others through `/proc/PID/fd`. So no
file is left behind in any directory, whichever rank is killed (docs/adr/0007-unnamed-shared-memory.md). The file is
longer than the machine's memory, but only pages that were written to take any.

Words are 8 bytes, aligned, each written by one rank. On x86-64 stores become visible in program order, so a rank
that has seen a counter also sees the data written before it; elsewhere `fence` orders them.

Restrictions: Linux; ranks that can open each other's files (same user, same process namespace). Otherwise there is no
shared memory, and messages do the work.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import platform
import secrets
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray

ALIGN_BYTES = 64  # a cache line: two ranks that write side by side must not take it from each other
WORD_BYTES = 8
TOKEN_BYTES = 16
MAP_NORESERVE = 0x4000  # Linux, all architectures; the constant came with Python 3.13

_lock = threading.Lock()


def fence() -> None:
    """Order every earlier load and store before every later one: a lock is a full memory barrier."""
    _lock.acquire()
    _lock.release()


ORDERED = platform.machine() in ("x86_64", "AMD64")  # the others see stores, and loads are made, in program order


class MemoryRange:
    """A range of a memory that is reserved from its beginning to its end; nothing is given back."""

    def __init__(self, begin_bytes: int, end_bytes: int) -> None:
        self._next, self._end = begin_bytes, end_bytes

    def reserve(self, n_bytes: int) -> int | None:
        """Return where the next `n_bytes` begin, at a cache line; None where fewer are left."""
        begin = aligned(self._next)
        if begin + n_bytes > self._end:
            return None
        self._next = begin + aligned(n_bytes)
        return begin


class HostMemory:
    """The memory that every rank of a host can read and write. `rank` of `size` counts the ranks of this host."""

    def __init__(self, rank: int, size: int, data: HostArray, *, threads: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.threads = threads  # the ranks are threads of one process
        self.n_bytes = data.size
        self._data = data
        self.address = data.__array_interface__["data"][0]

    def words(self, offset_bytes: int, count: int) -> memoryview:
        """Return `count` words, each a Python integer from 0 to 2^64 - 1."""
        return self._data[offset_bytes : offset_bytes + count * WORD_BYTES].data.cast("Q")

    def array(self, offset_bytes: int, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """Return a flat array over this memory; it keeps the memory alive."""
        return self._data[offset_bytes : offset_bytes + n_elems * dtype.itemsize].view(dtype)

    def offset_of(self, array: HostArray) -> int | None:
        """Return where in this memory a contiguous array lies; None if it does not."""
        offset: int = array.__array_interface__["data"][0] - self.address
        return offset if offset >= 0 and offset + array.nbytes <= self.n_bytes else None

    def discard(self, array: HostArray) -> None:
        """Give the pages within an array of this memory, which nobody needs any more, back to the system."""
        page = mmap.PAGESIZE
        offset = self.offset_of(array)
        mapping = getattr(self._data.base, "obj", None)
        if offset is None or not isinstance(mapping, mmap.mmap):
            return
        begin, end = -(-offset // page) * page, (offset + array.nbytes) // page * page
        if begin < end:
            with contextlib.suppress(OSError, AttributeError):
                mapping.madvise(mmap.MADV_REMOVE, begin, end - begin)


def aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _map(fd: int, n_bytes: int) -> HostArray:
    mapping = mmap.mmap(fd, n_bytes, flags=mmap.MAP_SHARED | MAP_NORESERVE)
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults, where the system allows it
    return np.frombuffer(mapping, np.uint8)


def memory_size_bytes() -> int:
    """Return the length of the shared file: three thirds, each of which may grow to all of the machine's memory."""
    return 3 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def private_memory(size: int) -> list[HostMemory]:
    """Return memory that `size` ranks share which are threads of this process: one `HostMemory` for each."""
    fd = os.memfd_create("mpikv")
    try:
        os.ftruncate(fd, memory_size_bytes())
        data = _map(fd, memory_size_bytes())
    finally:
        os.close(fd)
    return [HostMemory(rank, size, data, threads=True) for rank in range(size)]


def open_host_memory(rank: int, size: int, allgather: Callable[[bytes], list[bytes]]) -> tuple[HostMemory | None, str]:
    """Return memory that the ranks of this host share; None, and the reason, where they cannot. Collective over them.

    allgather: brings every rank's bytes to every rank.
    """
    fd, data, where, problem = -1, None, b"", ""
    if rank == 0:
        try:
            fd = os.memfd_create("mpikv")
            os.ftruncate(fd, memory_size_bytes())
            data = _map(fd, memory_size_bytes())
            token = secrets.token_bytes(TOKEN_BYTES)
            data[:TOKEN_BYTES] = np.frombuffer(token, np.uint8)
            where = json.dumps([os.getpid(), fd, data.size, token.hex()]).encode()
        except (OSError, ValueError, AttributeError) as error:
            problem = f"rank 0 cannot make it: {error}"
    where = allgather(where)[0]
    if rank != 0 and where:
        try:
            data = _open(*json.loads(where))
        except (OSError, ValueError) as error:
            problem = f"rank {rank} cannot open it: {error}"
    problems = [text.decode() for text in allgather(problem.encode()) if text]
    if fd >= 0:
        os.close(fd)
    # Every rank has read the token; where it was the counters begin, which are 0 at the start.
    if rank == 0 and data is not None:
        data[:TOKEN_BYTES] = 0
    allgather(b"")  # also after a failure, because ranks of other hosts may take part in the same calls
    if problems or data is None:
        return None, "; ".join(problems)
    return HostMemory(rank, size, data), ""


def on_all_hosts(memory: HostMemory | None, allgather: Callable[[bytes], list[bytes]]) -> HostMemory | None:
    """Return this host's memory, as long as the smallest of all hosts'; None where any has none. Collective."""
    sizes = allgather(str(0 if memory is None else memory.n_bytes).encode())
    smallest = min(map(int, sizes))
    if memory is None or smallest == 0:
        return None
    memory.n_bytes = smallest  # a key lies at the same place on all hosts, so within every host's memory
    return memory


def _open(pid: int, fd: int, n_bytes: int, token: str) -> HostArray:
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(own).st_size != n_bytes:
            raise ValueError("the file descriptor is that of another file")
        data = _map(own, n_bytes)
    finally:
        os.close(own)
    if data[:TOKEN_BYTES].tobytes() != bytes.fromhex(token):
        raise ValueError("the memory is that of another process")
    return data
