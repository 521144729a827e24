"""Device memory that the ranks of one host read of each other.

A rank's arrays are in chunks (pool.py). When it names an array to the others for the first time, it writes what its
driver exports of that chunk into a table in the memory that the ranks of the host share (hostmemory/segment); another
rank opens the chunk when it first meets it, and keeps it open. An array's name is one word: the number of its chunk,
and where in the chunk it begins. So after the first rounds nothing is exported or opened any more.

A name, and what the array contains, can be relied on once the rank that has said it has counted something: in host
memory, after it has seen its own work on the array done (`DeviceSpace.arrived`, `begun`). No rank opens its own chunks.

Cost: a call of the driver for each chunk that is exported, and for each one that is opened. Restrictions: ranks whose
GPUs can read each other's memory; `why_not_shared` finds that out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpikv.engine.request import Done, Request
from mpikv.errors import MpikvError
from mpikv.hostmemory.counters import Counters
from mpikv.hostmemory.counters import table_bytes as counters_bytes
from mpikv.hostmemory.segment import HostMemory
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.device_array import DeviceArray
from mpikv.spaces.driver import Driver
from mpikv.spaces.pool import Chunk

MOST_CHUNKS = 1 << 14  # of each rank: 512 GiB of full ones
ENTRY_BYTES = 256  # CUDA exports 64 bytes
LENGTH_BYTES = 2  # in front of what is exported
OFFSET_BITS = 44  # within a chunk
CLOSED, WORDS = 0, 1  # a counter of each rank: that it reads no more
TRIAL_BYTES = 2 << 20  # cudaMalloc puts shorter ones together into one allocation


def table_bytes(n_ranks: int) -> int:
    """What the table of a host takes of the memory that its ranks share, of which only what is used is ever there."""
    return counters_bytes(n_ranks, WORDS) + n_ranks * MOST_CHUNKS * ENTRY_BYTES


class Peers:
    """One rank's side. space: where its arrays are. begin_bytes: where the table is, zeros at the start."""

    def __init__(self, space: DeviceSpace, memory: HostMemory, begin_bytes: int) -> None:
        self._space, self._memory = space, memory
        self._closed = Counters(memory, begin_bytes, WORDS)
        self._begin = begin_bytes + counters_bytes(memory.size, WORDS)
        self._exported: set[int] = set()  # chunks of this rank
        self._opened: dict[tuple[int, int], int] = {}  # addresses of the others' chunks, by rank and number

    def word_of(self, array: DeviceArray) -> int:
        """The name of an array of this rank, contiguous, for the others. MpikvError where the table is full."""
        chunk = array.memory.chunk
        if chunk.number not in self._exported:
            self._export(chunk)
        return (chunk.number << OFFSET_BITS) + array.address - chunk.address

    def _export(self, chunk: Chunk) -> None:
        if chunk.number >= MOST_CHUNKS:
            raise MpikvError(
                f"this worker holds {chunk.number + 1} pieces of device memory, and other workers of its host can open "
                f"{MOST_CHUNKS} of them: give the store fewer long arrays, or set MPIKV_DEVICE_PATH=staged, which "
                "does without"
            )
        exported = self._space.driver.export(chunk.address)
        if len(exported) > ENTRY_BYTES - LENGTH_BYTES:
            raise MpikvError(f"{self._space.driver.name} exports {len(exported)} bytes, too many for the table")
        text = len(exported).to_bytes(LENGTH_BYTES, "little") + exported
        self._entry(self._memory.rank, chunk.number)[: len(text)] = np.frombuffer(text, np.uint8)
        self._exported.add(chunk.number)

    def array_of(self, place: int, word: int, n_elems: int, dtype: np.dtype[Any]) -> DeviceArray:
        """The array that another rank of the host has named, to be read only; after it has counted something."""
        number, offset = word >> OFFSET_BITS, word & ((1 << OFFSET_BITS) - 1)
        begin = self._opened.get((place, number))
        if begin is None:
            begin = self._open(place, number)
        n_bytes = n_elems * dtype.itemsize
        memory = self._space.pool.part(Chunk(number, begin, n_bytes), begin + offset, n_bytes)
        return DeviceArray(self._space, memory, 0, (n_elems,), dtype)

    def _open(self, place: int, number: int) -> int:
        assert place != self._memory.rank
        entry = self._entry(place, number).tobytes()
        length = int.from_bytes(entry[:LENGTH_BYTES], "little")
        begin = self._space.driver.open(entry[LENGTH_BYTES : LENGTH_BYTES + length])
        self._opened[place, number] = begin
        return begin

    def _entry(self, place: int, number: int) -> Any:
        return self._memory.array(
            self._begin + (place * MOST_CHUNKS + number) * ENTRY_BYTES, ENTRY_BYTES, np.dtype(np.uint8)
        )

    def close(self) -> Request:
        """Close the others' chunks, when all that the space has begun is done. A request that is done when all have.

        Only then may a rank free what it has exported. Collective. Blocks for what is under way on this rank's GPU.
        """
        self._space.settle()
        opened, self._opened = self._opened, {}
        for address in opened.values():
            self._space.driver.close(address)
        self._closed.count(CLOSED, 1)
        return self._closed.awaited(CLOSED, 1, soon=False) or Done()


def why_not_shared(driver: Driver | None, rank: int, allgather: Callable[[bytes], list[bytes]]) -> str:
    """Try whether the ranks of a host can open each other's device memory; what is in the way, "" for nothing.

    driver: of this rank's GPU; None: it has none. rank: among those of its host. allgather: brings the bytes of every
    rank of the host to each of them. Collective, blocks as `allgather` does. The same text on all ranks of the host.
    """
    address, exported, problem = None, b"", ""
    if driver is None:
        problem = f"rank {rank} of the host uses no GPU"
    else:
        try:
            address = driver.allocate(TRIAL_BYTES)
            exported = driver.export(address)
        except MpikvError as error:
            problem = f"rank {rank} of the host cannot export memory of {_name(driver)}: {error}"
    for other, theirs in enumerate(allgather(exported)):
        if driver is None or problem or other == rank or not theirs:
            continue
        try:
            driver.close(driver.open(theirs))
        except MpikvError as error:
            problem = f"rank {rank} of the host, on {_name(driver)}, cannot open the memory of rank {other}: {error}"
    problems = [text.decode() for text in allgather(problem.encode()) if text]
    if driver is not None and address is not None:
        driver.free(address)  # all have closed it: they have said how it went
    return "; ".join(problems)


def _name(driver: Driver) -> str:
    return f"GPU {driver.number} ({driver.name}, {driver.uuid})"
