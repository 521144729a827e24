"""Copies between the GPU on which a server inside a worker keeps its keys, and page-locked memory for messages.

Copies up to the GPU and down to the host are begun in the store's stream, in the order of the requests, and the server
waits for none of them. Cost: one copy up of each push, one down of each reply, except those of this worker itself
(transports/loopback.py); page-locked memory comes from the space's own pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation
from mpikv.server.memory import Pool, ReadableMemory
from mpikv.spaces.device import DeviceSpace


class DevicePool(Pool):
    """Arrays on a GPU, whose space has its own pool: an array is free once nothing refers to it any more."""

    def __init__(self, space: DeviceSpace) -> None:
        super().__init__(None, space)

    def take(self, n_elems: int, dtype: np.dtype[Any]) -> Any:
        return self._space.empty(n_elems, dtype)

    def give(self, array: Any) -> None:
        """See `Pool`."""


class DeviceCopies:
    """Copies to and from the GPU of the worker that a server runs in. values: the pool of arrays on the GPU."""

    def __init__(self, space: DeviceSpace) -> None:
        self.space = space
        self.values = DevicePool(space)

    def take(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        return self.space.page_locked(n_elems * dtype.itemsize).view(dtype)

    def give(self, array: HostArray) -> None:
        """Do nothing: memory of `take` is free once nothing refers to it any more."""

    def up(self, array: HostArray) -> Any:
        values = self.values.take(array.size, array.dtype)
        self.space.upload(values, array)
        return values

    def down(self, values: Any) -> tuple[ReadableMemory, Operation]:
        """Begin to copy values to page-locked memory. Returns that, with one reader, and a request for the copy."""
        array = self.take(values.size, values.dtype)
        self.space.download(array, values)
        block = ReadableMemory(array, self.give)
        block.readers = 1
        block.retire()
        return block, self.space.stream_event()
