"""Memory that the ranks of one host share.

One file without a name (memfd), made by the first rank and opened by the others through `/proc/PID/fd`, so that nothing
can be left behind in any directory, whoever is killed when (docs/adr/0007-unnamed-shared-memory.md). It is longer than
the machine's memory, but takes only what has been written to.

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


ORDERED = platform.machine() in ("x86_64", "AMD64")  # stores are seen in program order, and loads made in it


class MemoryRange:
    """Bytes of a memory that are given out from the beginning to the end and never taken back."""

    def __init__(self, begin_bytes: int, end_bytes: int) -> None:
        self._next, self._end = begin_bytes, end_bytes

    def reserve(self, n_bytes: int, *, pages: bool = False) -> int | None:
        """Return where the next `n_bytes` begin; None where fewer are left. pages: in whole pages of their own."""
        step = mmap.PAGESIZE if pages else ALIGN_BYTES
        begin = aligned(self._next, step)
        if begin + n_bytes > self._end:
            return None
        self._next = begin + aligned(n_bytes, step)
        return begin


class HostMemory:
    """The same bytes, seen by every rank of a host. `rank` of `size` counts the ranks of this host."""

    def __init__(self, rank: int, size: int, data: HostArray, *, threads: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.threads = threads  # the ranks are threads of one process
        self.n_bytes = data.size
        self._data = data
        self.address = data.__array_interface__["data"][0]

    def words(self, offset_bytes: int, count: int) -> memoryview:
        """Return `count` words, as integers."""
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


def aligned(n_bytes: int, step_bytes: int = ALIGN_BYTES) -> int:
    """The next multiple of a cache line, or of another step."""
    return -(-n_bytes // step_bytes) * step_bytes


def _map(fd: int, n_bytes: int) -> HostArray:
    mapping = mmap.mmap(fd, n_bytes, flags=mmap.MAP_SHARED | MAP_NORESERVE)
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults, where the system allows it
    return np.frombuffer(mapping, np.uint8)


def memory_size_bytes() -> int:
    """How long the shared file is: three parts, each of which may grow to all of the machine's memory."""
    return 3 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def private_memory(size: int) -> list[HostMemory]:
    """The same memory for `size` ranks that are threads of this process."""
    fd = os.memfd_create("mpikv")
    try:
        os.ftruncate(fd, memory_size_bytes())
        data = _map(fd, memory_size_bytes())
    finally:
        os.close(fd)
    return [HostMemory(rank, size, data, threads=True) for rank in range(size)]


def open_host_memory(rank: int, size: int, allgather: Callable[[bytes], list[bytes]]) -> tuple[HostMemory | None, str]:
    """Memory shared by ranks that are all on this host, and why there is none. Collective over them.

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
    # The token was in the place of the counters, and every rank has read it.
    if rank == 0 and data is not None:
        data[:TOKEN_BYTES] = 0
    allgather(b"")  # in any case: other hosts may take part in it
    if problems or data is None:
        return None, "; ".join(problems)
    return HostMemory(rank, size, data), ""


def on_all_hosts(memory: HostMemory | None, allgather: Callable[[bytes], list[bytes]]) -> HostMemory | None:
    """The memory of this host, as long as the smallest one; None on every host where one host has none. Collective.

    allgather: brings every rank's bytes to every rank, of all hosts.
    """
    sizes = allgather(str(0 if memory is None else memory.n_bytes).encode())
    smallest = min(map(int, sizes))
    if memory is None or smallest == 0:
        return None
    memory.n_bytes = smallest  # a place beyond the end of one host's memory is of no use to the others
    return memory


def _open(pid: int, fd: int, n_bytes: int, token: str) -> HostArray:
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(own).st_size != n_bytes:
            raise ValueError("another file has its number")
        data = _map(own, n_bytes)
    finally:
        os.close(own)
    if data[:TOKEN_BYTES].tobytes() != bytes.fromhex(token):
        raise ValueError("it is another process's")
    return data
