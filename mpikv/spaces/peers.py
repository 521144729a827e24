"""Device memory that the ranks of one host read of each other, by CUDA's interprocess communication.

Arrays that others read have allocations of their own (`DeviceSpace.shared_empty`). A rank exports an allocation when it
first names an array in it to others: it writes CUDA's handle into a table in the memory that the ranks of the host
share (hostmemory/segment). Another rank opens the allocation when it first reads in it, and keeps it open. The name of
an array is one word: the number of its allocation, and the offset of the array in it. So after the first rounds no rank
exports or opens anything.

A rank that names an array first waits until its own work on it is done (`DeviceSpace.written`, `stream_event`), and
then increases a counter in host memory. Others may use the name and read the array once they have seen that count. No
rank opens its own memory.

Cost: a call of CUDA for each allocation that is exported, and for each one that is opened. Restrictions: the GPUs of
the ranks must be able to read each other's memory; `why_not_shared` tries that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpikv.engine.operation import Done, Operation
from mpikv.errors import MpikvError
from mpikv.hostmemory.counters import Counters
from mpikv.hostmemory.counters import table_bytes as counters_bytes
from mpikv.hostmemory.segment import HostMemory
from mpikv.spaces.device import ALLOCATION_BYTES, DeviceSpace
from mpikv.spaces.gpu import Gpu

MOST_CHUNKS = 1 << 14  # of each rank: 512 GiB if all are full
HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
OFFSET_BITS = 44  # within an allocation
CLOSED, WORDS = 0, 1  # each rank has one counter, which becomes 1 when it will read no more


def table_bytes(n_ranks: int) -> int:
    """Return the length of a host's table in the memory that its ranks share; pages without handles take no memory."""
    return counters_bytes(n_ranks, WORDS) + n_ranks * MOST_CHUNKS * HANDLE_BYTES


class Peers:
    """One rank's access to the table. space: of its arrays. begin_bytes: offset of the table, zeros at first."""

    def __init__(self, space: DeviceSpace, memory: HostMemory, begin_bytes: int) -> None:
        self._space, self._memory = space, memory
        self._closed = Counters(memory, begin_bytes, WORDS)
        self._begin = begin_bytes + counters_bytes(memory.size, WORDS)
        self._exported: set[int] = set()  # allocations of this rank, by number
        self._opened: dict[tuple[int, int], int] = {}  # addresses of other ranks' allocations, by rank and number

    def word_of(self, array: Any) -> int:
        """Return the name of a contiguous array of `shared_empty`. Raises MpikvError if the table is full."""
        address = array.data.ptr
        number, chunk = next(
            (i, one)
            for i, one in enumerate(self._space.chunks)
            if one.ptr <= address and address + array.nbytes <= one.ptr + one.size
        )
        if number not in self._exported:
            if number >= MOST_CHUNKS:
                raise MpikvError(
                    f"this worker holds {number + 1} chunks of device memory, and other workers of its host can open "
                    f"{MOST_CHUNKS} of them: give the store fewer long arrays, or set MPIKV_DEVICE_PATH=staged, which "
                    "does without"
                )
            self._entry(self._memory.rank, number)[:] = np.frombuffer(_export(self._space.gpu, chunk.ptr), np.uint8)
            self._exported.add(number)
        return int((number << OFFSET_BITS) + address - chunk.ptr)

    def array_of(self, rank: int, word: int, n_elems: int, dtype: np.dtype[Any]) -> Any:
        """Return the array that another rank of the host has named, to be read only. Its count must have been seen."""
        number, offset = word >> OFFSET_BITS, word & ((1 << OFFSET_BITS) - 1)
        begin = self._opened.get((rank, number))
        if begin is None:
            assert rank != self._memory.rank
            begin = _open(self._space.gpu, self._entry(rank, number).tobytes())
            self._opened[rank, number] = begin
        return self._space.gpu.array_at(begin + offset, (n_elems,), dtype, self)

    def _entry(self, rank: int, number: int) -> Any:
        return self._memory.array(
            self._begin + (rank * MOST_CHUNKS + number) * HANDLE_BYTES, HANDLE_BYTES, np.dtype(np.uint8)
        )

    def close(self) -> Operation:
        """Close the other ranks' memory. Returns a request that is done when all ranks have; then memory may be freed.

        Collective. Blocks until the work under way on this rank's GPU is done.
        """
        self._space.synchronize()
        opened, self._opened = self._opened, {}
        for address in opened.values():
            _close(self._space.gpu, address)
        self._closed.count(CLOSED, 1)
        return self._closed.awaited(CLOSED, 1, soon=False) or Done()


def _export(gpu: Gpu, address: int) -> bytes:
    with gpu.current("lets other processes open its memory"):
        return bytes(gpu.cupy.cuda.runtime.ipcGetMemHandle(address))


def _open(gpu: Gpu, handle: bytes) -> int:
    with gpu.current("opens memory of another process, which has to be on this host, in the same IPC namespace"):
        return int(gpu.cupy.cuda.runtime.ipcOpenMemHandle(handle))


def _close(gpu: Gpu, address: int) -> None:
    with gpu.current("closes memory of another process"):
        gpu.cupy.cuda.runtime.ipcCloseMemHandle(address)


def why_not_shared(gpu: Gpu | None, rank: int, allgather: Callable[[bytes], list[bytes]]) -> str:
    """Try whether the ranks of a host can read each other's device memory. Returns why not; "" if they can.

    Each rank writes a pattern of its own, and reads those of the others by a copy and by a kernel: behind some IOMMUs a
    GPU reads zeros of another one, and CUDA reports success (NVIDIA's open-gpu-kernel-modules, issue 1257).

    gpu: of this rank; None: it has none. rank: among those of its host. allgather: returns the bytes of every rank of
    the host to each of them. Collective, blocks as `allgather` does. All ranks of the host return the same text.
    """
    memory: Any = None
    exported, problem = b"", ""
    if gpu is None:
        problem = f"rank {rank} of the host uses no GPU"
    else:
        try:
            with gpu.current("tries to let other processes read its memory"):
                memory = gpu.cupy.cuda.Memory(ALLOCATION_BYTES)
                gpu.array_at(memory.ptr, (TRIAL_ELEMS,), _PATTERN, memory).set(_pattern(rank))
                gpu.cupy.cuda.get_current_stream().synchronize()
            exported = _export(gpu, memory.ptr)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must get to know it
            problem = f"rank {rank} of the host cannot export memory of {gpu}: {error}"
    for other, theirs in enumerate(allgather(exported)):
        if gpu is None or problem or other == rank or not theirs:
            continue
        try:
            wrong = _reads_wrong(gpu, theirs, other)
        except Exception as error:  # noqa: BLE001 - as above
            wrong = f"cannot open the memory of rank {other}: {error}"
        if wrong:
            problem = f"rank {rank} of the host, on {gpu}, {wrong}"
    problems = [text.decode() for text in allgather(problem.encode()) if text]
    del memory  # all ranks have closed it, since their outcomes are here
    return "; ".join(problems)


TRIAL_ELEMS = 1 << 16
_PATTERN = np.dtype(np.int32)


def _pattern(rank: int) -> Any:
    return np.arange(1, TRIAL_ELEMS + 1, dtype=_PATTERN) * (rank + 3)


def _reads_wrong(gpu: Gpu, handle: bytes, other: int) -> str:
    address = _open(gpu, handle)
    try:
        with gpu.current("reads memory of another process"):
            theirs = gpu.array_at(address, (TRIAL_ELEMS,), _PATTERN, None)
            copied = gpu.cupy.empty(TRIAL_ELEMS, _PATTERN)
            np.copyto(copied, theirs)
            computed = np.add(theirs, _PATTERN.type(1))
            by_copy, by_kernel = copied.get(), computed.get()
    finally:
        _close(gpu, address)
    expected = _pattern(other)
    if np.array_equal(by_copy, expected) and np.array_equal(by_kernel, expected + 1):
        return ""
    return (
        f"reads wrong values of the memory of rank {other}, without an error of CUDA's (an IOMMU between the GPUs, "
        "perhaps: the kernel's option iommu=pt, or ACS off in the BIOS, may help)"
    )
