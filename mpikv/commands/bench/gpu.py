"""A worker's GPU for the benchmarks: the one that its stores use, and CuPy's arrays on it such as a user has.

A user's work is in the stream that is current, which results of the store's calls are ordered before. A time ends when
the host has seen that stream, or another that was used, come to its end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv import kv
from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench.job import Job
from mpikv.commands.bench.pattern import Pattern
from mpikv.errors import ConfigError
from mpikv.kvstore import KVStore
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.gpu import Gpu
from mpikv.spaces.pinned import Pinned


def device_store(job: Job) -> KVStore:
    """Return a store of this worker's on its GPU, without servers. Collective; blocks."""
    return kv.create("dist_sync_device", comm=job.comm, config=job.config.with_(num_servers=0))


def open_space(job: Job, store: KVStore) -> DeviceSpace:
    """Return where a store of this worker's has arrays on its GPU, which is this thread's from now on.

    Raises ConfigError on all where one has no GPU. Collective.
    """
    space = store.session.spaces.device
    without = [str(rank) for rank, one in enumerate(job.comm.allgather(space is None)) if one]
    if space is None or without:
        why = next(iter(dict(store.stats().get("device_path_reasons", ())).values()), store.session.spaces.missing)
        raise ConfigError(f"--device needs a GPU for each worker, and rank {', '.join(without)} has none: {why}")
    space.gpu.take()  # a benchmark's thread is its own
    return space


def finish(gpu: Gpu, *streams: Any) -> None:
    """Wait for the end of all work in these streams, by default in the current one, where a user's work is."""
    for stream in streams or (gpu.cupy.cuda.get_current_stream(),):
        stream.synchronize()


def download(gpu: Gpu, array: Any, out: HostArray) -> None:
    """Begin to copy an array, in the current stream, to page-locked memory."""
    array.data.copy_to_host_async(out.ctypes.data, array.nbytes, gpu.cupy.cuda.get_current_stream())


def upload(gpu: Gpu, array: Any, values: HostArray, stream: Any = None) -> None:
    """Begin to copy page-locked memory to an array, in the current stream or another one."""
    stream = gpu.cupy.cuda.get_current_stream() if stream is None else stream
    array.data.copy_from_host_async(values.ctypes.data, array.nbytes, stream)


class DevicePattern:
    """`Pattern` for arrays on a GPU: they are filled by a copy on the GPU, and compared on the host."""

    def __init__(self, gpu: Gpu, pattern: Pattern, largest_bytes: int) -> None:
        """largest_bytes: of the arrays to come."""
        self._gpu, self._pattern, self._dtype = gpu, pattern, pattern.mine.dtype
        self._host = Pinned(gpu).take(largest_bytes).view(self._dtype)
        self._masters: dict[int, Any] = {}

    def _master(self, sign: int) -> Any:
        """Return this rank's values, times `sign`, in device memory."""
        if sign not in self._masters:
            self._pattern.fill(self._host, sign)
            self._masters[sign] = self._gpu.cupy.empty(self._host.shape, self._dtype)
            upload(self._gpu, self._masters[sign], self._host)
            self.finish()
        return self._masters[sign]

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Return a new array of zeros."""
        return self._gpu.cupy.zeros(shape, self._dtype)

    def fill(self, array: Any, sign: int = 1) -> None:
        """Begin to write this rank's values, times `sign`, which may be 0, into `array`."""
        self._gpu.cupy.copyto(array, self._master(sign)[: array.size].reshape(array.shape))

    def is_total(self, array: Any, factor: int = 1) -> bool:
        """Whether `array` holds the sum over all ranks, times `factor`, exactly."""
        if isinstance(array, np.ndarray):  # what a pull of a host key returns
            return self._pattern.is_total(array, factor)
        values: HostArray = self._host[: array.size]
        download(self._gpu, array, values)
        self.finish()
        return self._pattern.is_total(values, factor)

    def finish(self) -> None:
        """Wait for all that was begun with arrays."""
        finish(self._gpu)

    def delivered(self) -> None:
        """Wait until the stream that a user's work is in has come so far."""
        finish(self._gpu)
