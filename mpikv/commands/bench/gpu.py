"""Arrays on GPUs as contenders: `pushpull` of a `*_device` store, by the path that it has chosen.

Where every worker has a GPU they take part in the tables of arrays in host memory: raw MPI there is what has to be
beaten, since its result would have to be copied up yet. A call ends when the stream that the user's work is in has come
so far. `MPIKV_DEVICE_PATH` forces a path.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.pattern import Pattern
from mpikv.create import worker_device
from mpikv.create.spec import parse
from mpikv.placement.topology import topology
from mpikv.spaces.gpu import Gpu


def is_everywhere(job: BenchJob) -> bool:
    """Whether every rank has a GPU that a store would use. Collective."""
    found = worker_device.find(parse("dist_sync_device"), job.config, topology(job.hosts).local_rank[job.rank])
    return all(job.comm.allgather(found.gpu is not None))


class GpuPattern(Pattern):
    """A pattern for arrays on a GPU: they are filled from host memory, and compared there."""

    def __init__(self, gpu: Gpu, dtype: np.dtype[np.generic], rank: int, size: int) -> None:
        super().__init__(dtype, rank, size)
        gpu.take()  # a benchmark's thread is its own
        self._cupy = gpu.cupy

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self._cupy.zeros(shape, self.mine.dtype)

    def fill(self, array: Any, sign: int = 1) -> None:
        values = super().zeros(array.shape)
        super().fill(values, sign)
        array.set(values)

    def is_total(self, array: Any, factor: int = 1) -> bool:
        # What a pull of a key in host memory returns is there already.
        return super().is_total(array if isinstance(array, np.ndarray) else array.get(), factor)

    def finish(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()
