"""A worker's GPU for the benchmarks: the one that its stores use, and arrays on it such as a user has.

All goes through the driver that stores go through (`Driver`), which is asked for in one place, `driver_of`: so a
benchmark runs wherever a store does, on a fake GPU, too. What it asks of the GPU itself, it puts into a stream of its
own, and waits for its end before anything is timed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv import kv
from mpikv.arrays import HostArray
from mpikv.bench.job import Job
from mpikv.bench.pattern import Pattern
from mpikv.errors import ConfigError, StallError
from mpikv.kvstore import KVStore
from mpikv.spaces.callers import LEGACY
from mpikv.spaces.driver import Driver
from mpikv.spaces.pool import ALIGN_BYTES

LIMIT_S = 60.0  # of one wait; copies end long before, or the GPU has failed


def driver_of(store: KVStore) -> Driver | None:
    """Return what a store asks its GPU by, None where it uses none."""
    space: Any = store.session.spaces.device
    return None if space is None else space.driver


def device_store(job: Job) -> KVStore:
    """Return a store of this worker's on its GPU, without servers. Collective; blocks."""
    return kv.create("dist_sync_device", comm=job.comm, config=job.config.with_(num_servers=0))


def open_gpu(job: Job, store: KVStore) -> Gpu:
    """Return the GPU that this worker's stores use. Raises ConfigError on all where one has none. Collective."""
    driver = driver_of(store)
    without = [str(rank) for rank, one in enumerate(job.comm.allgather(driver is None)) if one]
    if driver is None or without:
        why = next(iter(dict(store.stats().get("device_path_reasons", ())).values()), store.session.spaces.missing)
        raise ConfigError(f"--device needs a GPU for each worker, and rank {', '.join(without)} has none: {why}")
    return Gpu(driver)


class Gpu:
    """One GPU, with a stream of the benchmark's own, and the memory that it has taken."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.stream()
        self._taken: list[int] = []

    def memory(self, n_bytes: int) -> int:
        """Return the address of new device memory, which `close` gives back. Raises OutOfDeviceMemory."""
        address = self.driver.allocate(max(n_bytes, 1))
        self._taken.append(address)
        return address

    def arrays(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[Any]:
        """Return arrays of any content, of the library that users of this driver have, in memory of their own."""
        lengths = [-(-math.prod(shape) * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES for shape in shapes]
        first = self.memory(sum(lengths))
        begins = np.cumsum([0, *lengths[:-1]])
        return [
            self.driver.as_caller(first + int(begin), shape, dtype, self)
            for begin, shape in zip(begins, shapes, strict=True)
        ]

    def copy(self, to: int, source: int, n_bytes: int, stream: int | None = None) -> None:
        """Begin to copy, in the benchmark's stream or another one."""
        if n_bytes:
            self.driver.copy(to, source, n_bytes, self.stream if stream is None else stream)

    def finish(self, *streams: int) -> None:
        """Wait for all that is in the streams, by default the benchmark's own and the one that users' work is in.

        It asks without a nap in between, since a nap of the length that it takes to wake up would be in every figure;
        whoever else wants the core gets it in each turn. Raises StallError.
        """
        until_s = time.monotonic() + LIMIT_S
        for stream in streams or (self.stream, LEGACY):
            event = self.driver.record(stream)
            while not self.driver.done(event):
                if time.monotonic() > until_s:
                    raise StallError(f"GPU {self.driver.number} has not ended a piece of work within {LIMIT_S:g} s")
                os.sched_yield()

    def close(self) -> None:
        """Give all memory back. Nothing may be under way, and no array in it may be used any more."""
        self.finish()
        taken, self._taken = self._taken, []
        for address in taken:
            self.driver.free(address)


def address_of(array: Any) -> int:
    """Return where an array of a user's begins in device memory."""
    address: int = array.__cuda_array_interface__["data"][0]
    return address


class DevicePattern:
    """`Pattern` for arrays on a GPU: they are filled by a copy on the GPU, and compared on the host."""

    def __init__(self, gpu: Gpu, pattern: Pattern, largest_bytes: int) -> None:
        """largest_bytes: of the arrays to come."""
        self._gpu, self._pattern, self._dtype = gpu, pattern, pattern.mine.dtype
        self._host = gpu.driver.pinned(largest_bytes).view(self._dtype)
        self._masters: dict[int, int] = {}

    def _master(self, sign: int) -> int:
        """Return where this rank's values, times `sign`, are in device memory."""
        if sign not in self._masters:
            if sign:
                self._pattern.fill(self._host, sign)
            else:
                self._host.fill(0)
            self._masters[sign] = self._gpu.memory(self._host.nbytes)
            self._gpu.copy(self._masters[sign], self._host.ctypes.data, self._host.nbytes)
            self._gpu.finish()
        return self._masters[sign]

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Return a new array of zeros."""
        (array,) = self._gpu.arrays([shape], self._dtype)
        self.fill(array, 0)
        self._gpu.finish()
        return array

    def fill(self, array: Any, sign: int = 1) -> None:
        """Begin to write this rank's values, times `sign`, which may be 0, into `array`."""
        self._gpu.copy(address_of(array), self._master(sign), array.nbytes)

    def is_total(self, array: Any, factor: int = 1) -> bool:
        """Whether `array` holds the sum over all ranks, times `factor`, exactly."""
        if isinstance(array, np.ndarray):  # what a pull of a host key returns
            return self._pattern.is_total(array, factor)
        values: HostArray = self._host[: array.size]
        self._gpu.copy(values.ctypes.data, address_of(array), array.nbytes)
        self._gpu.finish()
        return self._pattern.is_total(values, factor)

    def finish(self) -> None:
        """Wait for all that was begun with arrays."""
        self._gpu.finish()

    def delivered(self) -> None:
        """Wait until the stream that a user's work is in has come so far."""
        self._gpu.finish(LEGACY)
