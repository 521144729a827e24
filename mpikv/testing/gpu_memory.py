"""The memory of fake GPUs: what is allocated, what an address belongs to, and how other processes open it.

Device memory is host memory at a real address, so that MPI, NumPy and ctypes see it. What `allocate` makes is a file
without a name (memfd), which other processes of the host open through `/proc/PID/fd`, as they do with the memory that
ranks share (hostmemory/segment.py), and which other views in this process map a second time: an opened allocation has
another address than its owner's, as with CUDA.

Restrictions: Linux; processes that can open each other's files (same user, same process namespace).
"""

from __future__ import annotations

import bisect
import json
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpikv.arrays import HostArray
from mpikv.errors import MpikvError

POISON = 0xFF  # bytes of it are NaN in each floating point dtype, -1 or the largest value in the others
ALIGN_BYTES = 256  # of device memory, as cudaMalloc's
_FREED = 256  # how many freed memories are known by name

Gone = tuple["Memory", Any]
"""Memory that was let go, and the stream whose work may reuse it."""


class AccessError(AssertionError):
    """Memory, a stream or an event is used that is not there: freed, of another process, or never made.

    >>> from mpikv.testing.fake_gpu import FakeGpu
    >>> gpu = FakeGpu()
    >>> memory = gpu.allocate(8)
    >>> gpu.free(memory)
    >>> gpu.copy(memory, memory, 8, gpu.stream())
    Traceback (most recent call last):
    mpikv.testing.gpu_memory.AccessError: ... was freed
    """


class Span(NamedTuple):
    """Bytes from `begin` to `end`, or only the `runs` among them: (n, 2), each its begin and end, in order, apart."""

    begin: int
    end: int
    runs: npt.NDArray[np.int64] | None = None

    @classmethod
    def of_runs(cls, begins: npt.NDArray[np.int64], length: int) -> Span:
        """Runs of one length, which may overlap, in any order."""
        if begins.size == 1:  # most are; the rest takes 50 us
            return cls(int(begins[0]), int(begins[0]) + length)
        begins = np.unique(begins)
        new = np.flatnonzero(np.diff(begins) > length) + 1  # where a gap is before it
        first, last = np.concatenate([[0], new]), np.concatenate([new - 1, [begins.size - 1]])
        runs = np.stack([begins[first], begins[last] + length], axis=1)
        return cls(int(runs[0, 0]), int(runs[-1, 1]), runs if len(runs) > 1 else None)

    def moved(self, by: int) -> Span:
        """The same, elsewhere."""
        return Span(self.begin + by, self.end + by, None if self.runs is None else self.runs + by)

    def overlap(self, other: Span) -> tuple[int, int] | None:
        """The first bytes that both have, None where there are none."""
        begin, end = max(self.begin, other.begin), min(self.end, other.end)
        if begin >= end:
            return None
        if self.runs is None and other.runs is None:
            return begin, end
        mine, theirs = (np.array([[one.begin, one.end]]) if one.runs is None else one.runs for one in (self, other))
        next_mine = np.searchsorted(mine[:, 1], theirs[:, 0], side="right")  # the first that ends behind its begin
        inside = next_mine < len(mine)
        meets = np.flatnonzero(inside)[mine[next_mine[inside], 0] < theirs[inside, 1]]
        if not meets.size:
            return None
        a, b = mine[next_mine[meets[0]]], theirs[meets[0]]
        return int(max(a[0], b[0])), int(min(a[1], b[1]))


class Bytes:
    """What views of the same bytes share. accesses, limits: by stream, those that are to be known (gpu_work.py)."""

    def __init__(self) -> None:
        self.accesses: dict[Any, Any] = {}
        self.limits: dict[Any, int] = {}


class Memory:
    """Memory as one process sees it. device: that of a GPU, None of the host. offset: of its begin in `bytes`."""

    def __init__(self, what: str, data: HostArray, device: Device | None, shared: Bytes, offset: int = 0) -> None:
        self.what, self.data, self.device, self.bytes, self.offset = what, data, device, shared, offset
        self.address: int = data.__array_interface__["data"][0]
        self.n_bytes = data.size

    @property
    def whole(self) -> Span:
        """All of it, as part of `bytes`."""
        return Span(self.offset, self.offset + self.n_bytes)

    def __str__(self) -> str:
        return f"{self.what} at {self.address:#x} ({self.n_bytes} bytes)"


class Device:
    """The memory of one GPU, which several processes may use. used_bytes: by all of them."""

    def __init__(self, uuid: str, memory_bytes: int) -> None:
        self.uuid, self.memory_bytes, self.used_bytes = uuid, memory_bytes, 0


class Owned(NamedTuple):
    """An allocation that others may open. owner: the process that has it. opened: those that have opened it.

    close: closes the file, at the latest when the memory is let go.
    """

    owner: AddressSpace
    memory: Memory
    fd: int
    close: Callable[[], object]
    opened: set[AddressSpace]


class Handle(NamedTuple):
    """What `export` returns, as it travels: an allocation as a whole."""

    uuid: str
    pid: int
    fd: int
    n_bytes: int
    inode: int

    def encode(self) -> bytes:
        """As bytes."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, exported: bytes) -> Handle:
        """Of bytes. Raises AccessError for any that `export` has not made."""
        try:
            return cls(*json.loads(exported))
        except (ValueError, TypeError) as error:
            raise AccessError(f"open: this is not what `export` returned: {exported!r:.80}") from error

    def map(self, path: str) -> HostArray:
        """The allocation's bytes once more, at another address. Raises MpikvError where its owner has gone."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if (found.st_ino, found.st_size) != (self.inode, self.n_bytes):
                    raise OSError("another file has its number")
                return _map(fd, self.n_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise MpikvError(f"cannot open the memory of process {self.pid} on GPU {self.uuid}: {error}") from error


class AddressSpace:
    """What memory a process has, by address. Not safe for threads."""

    def __init__(self) -> None:
        self.opened: dict[int, tuple[int, int]] = {}  # of each address, whose and which: process and inode
        self._begins: list[int] = []
        self._memories: dict[int, Memory] = {}
        self._gone: deque[tuple[int, int, str]] = deque(maxlen=_FREED)

    def add(self, memory: Memory) -> Memory:
        """Put a memory in, and return it."""
        end = memory.address + memory.n_bytes
        self._gone = deque((one for one in self._gone if one[1] <= memory.address or one[0] >= end), maxlen=_FREED)
        bisect.insort(self._begins, memory.address)
        self._memories[memory.address] = memory
        return memory

    def remove(self, memory: Memory, how: str) -> None:
        """Take a memory out. how: what happened to it, for errors about a later use."""
        self._begins.remove(memory.address)
        del self._memories[memory.address]
        self._gone.append((memory.address, memory.address + memory.n_bytes, f"{memory} was {how}"))

    def at(self, address: int, what: str, kind: str) -> Memory:
        """The memory that begins there and is of a kind, a word that its name begins with."""
        memory = self._memories.get(address)
        if memory is None or not memory.what.startswith(kind):
            raise AccessError(f"{what}: no {kind} begins at {address:#x}{self._story(address)}")
        return memory

    def within(self, begin: int, end: int) -> list[Memory]:
        """Every memory that has some of these bytes."""
        return [one for one in self._memories.values() if one.address < end and begin < one.address + one.n_bytes]

    def find(self, span: Span) -> Memory | None:
        """The memory that has bytes from the first to the last; None where there is none of this process.

        Raises AccessError where it begins in one and ends behind it, or was freed.
        """
        i = bisect.bisect_right(self._begins, span.begin) - 1
        memory = self._memories[self._begins[i]] if i >= 0 else None
        if memory is not None and span.begin < memory.address + memory.n_bytes:
            if span.end > memory.address + memory.n_bytes:
                raise AccessError(f"bytes {span.begin:#x} to {span.end:#x} go beyond the end of {memory}")
            return memory
        story = self._story(span.begin)
        if story:
            raise AccessError(f"bytes {span.begin:#x} to {span.end:#x} are used{story}")
        return None

    def _story(self, address: int) -> str:
        return next((f": {text}" for begin, end, text in reversed(self._gone) if begin <= address < end), "")


def new_file(n_bytes: int) -> tuple[HostArray, int]:
    """Memory of a file without a name, and the file."""
    fd = os.memfd_create("mpikv-fake-gpu")
    os.ftruncate(fd, n_bytes)
    return _map(fd, n_bytes), fd


def _map(fd: int, n_bytes: int) -> HostArray:
    return np.frombuffer(mmap.mmap(fd, n_bytes, flags=mmap.MAP_SHARED), np.uint8)


def new_array(n_bytes: int) -> HostArray:
    """Memory of this process alone, aligned as a GPU's, full of NaN."""
    raw = np.full(n_bytes + ALIGN_BYTES, POISON, np.uint8)
    begin = -raw.__array_interface__["data"][0] % ALIGN_BYTES
    return raw[begin : begin + n_bytes]


def handed_out(data: HostArray, gone: deque[Gone], note: Gone) -> HostArray:
    """An array of the same bytes; when it and all its views are let go, the note goes into `gone`."""
    array: HostArray = np.frombuffer(data.data, np.uint8)
    weakref.finalize(array, gone.append, note).atexit = False
    return array
