"""The memory of a server inside a worker that uses a GPU: keys are held there, what comes and goes is page-locked.

Copies up and down are begun in the store's stream, in the order of the requests, and the server waits for none of them.
Cost: one copy up of each push, one down of each reply, but of those that this worker hands over
(transports/loopback.py); page-locked memory comes from the space's own pool.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation
from mpikv.server.memory import Pool, ReadableMemory
from mpikv.spaces.device import DeviceSpace


class DevicePool(Pool):
    """Arrays on a GPU, whose space has its own pool: an array that nobody refers to any more is free."""

    def __init__(self, space: DeviceSpace) -> None:
        super().__init__(None, space)

    def take(self, n_elems: int, dtype: np.dtype[Any]) -> Any:
        """See `Pool`."""
        return self._space.empty(n_elems, dtype)

    def give(self, array: Any) -> None:
        """See `Pool`."""


class Lifts:
    """Page-locked memory between messages and the GPU of the worker that a server is in, and the copies there.

    values: arrays on the GPU. Copies up and down are begun in the store's stream, and nobody waits for them here.
    """

    def __init__(self, space: DeviceSpace) -> None:
        self.space = space
        self.values = DevicePool(space)
        self._leaving: deque[tuple[Operation, HostArray]] = deque()

    def take(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """(n_elems,) of page-locked memory, in which no copy is under way."""
        while self._leaving and self._leaving[0][0].test():
            self._leaving.popleft()
        return self.space.pinned.take(n_elems * dtype.itemsize).view(dtype)

    def give(self, array: HostArray) -> None:
        """Take back what `take` returned: it goes with the last reference."""

    def up(self, array: HostArray) -> Any:
        """The values on the GPU. The memory, of `take`, is kept until they are there."""
        values = self.values.take(array.size, array.dtype)
        self.space.upload(values, array)
        self._leaving.append((self.space.stream_event(), array))
        return values

    def down(self, values: Any) -> tuple[ReadableMemory, Operation]:
        """Page-locked memory with one reader, and when the values are in it."""
        array = self.take(values.size, values.dtype)
        self.space.download(array, values)
        block = ReadableMemory(array, self.give)
        block.readers = 1
        block.leave()
        return block, self.space.stream_event()
