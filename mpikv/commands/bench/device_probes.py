"""What the GPUs can do, measured by the same processes just before: the rates in `device_limits`.

- copy: on the device, of as many bytes as the value has, 64 MiB at least, which are in no cache; by the first rank of
  each GPU, while the others that share it sleep. Several copies in a row, so that beginning one costs nothing.
- down, up, both: copies from the device to page-locked host memory, back, and both at once in two streams; by all ranks
  at the same time.
- wait: a copy of 8 bytes, begun and waited for.

Figures are medians of the slowest rank; that of the wait is its lowest tenth, as the ping-pong's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mpikv.commands.bench.device_limits import DeviceRates
from mpikv.commands.bench.gpu import download, finish, upload
from mpikv.commands.bench.job import Job
from mpikv.commands.bench.probes import quiet_barrier
from mpikv.commands.bench.statistics import median, undisturbed
from mpikv.spaces.gpu import Gpu
from mpikv.spaces.pinned import Pinned

LEAST_BYTES = 64 << 20  # below, beginning a copy is measured and not the memory
COPIES, TURNS, WAITS = 8, 7, 100


def ranks_per_gpu(job: Job, gpu: Gpu) -> tuple[int, bool]:
    """Return how many ranks share the GPU with most, and whether this one is the first on its own. Collective."""
    sharing = job.comm.allgather((job.hosts[job.rank], gpu.uuid))
    return max(map(sharing.count, sharing)), sharing.index(sharing[job.rank]) == job.rank


def device_rates(job: Job, gpu: Gpu, n_bytes: int, link_bytes_per_s: float | None = None) -> DeviceRates:
    """Measure. latency_s is left 0: it is the host's. Collective, blocks."""
    cupy, n, (_, is_first) = gpu.cupy, max(LEAST_BYTES, n_bytes), ranks_per_gpu(job, gpu)
    source, to = (cupy.zeros(n, np.uint8) for _ in range(2))
    below, above = (Pinned(gpu).take(n) for _ in range(2))
    below[:], above[:] = 0, 0
    streams = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)

    def seconds(work: Callable[[], None], turns: int = TURNS, times: int = 1) -> list[float]:
        found = []
        for _ in range(turns):
            finish(gpu, *streams)
            start_s = time.perf_counter()
            for _ in range(times):
                work()
            finish(gpu, *streams)
            found.append((time.perf_counter() - start_s) / times)
        return found

    def both() -> None:
        upload(gpu, to, above, streams[1])
        download(gpu, source, below)

    copy_s = median(seconds(lambda: cupy.copyto(to, source), TURNS, COPIES)) if is_first else 0.0
    quiet_barrier(job.comm)
    down_s = median(seconds(lambda: download(gpu, source, below)))
    up_s = median(seconds(lambda: upload(gpu, to, above)))
    both_s = median(seconds(both))
    wait_s = undisturbed(seconds(lambda: cupy.copyto(to[:8], source[:8]), WAITS))
    slowest = [max(one) for one in zip(*job.comm.allgather((copy_s, down_s, up_s, both_s, wait_s)), strict=True)]
    return DeviceRates(
        0.0, slowest[4], n / slowest[0], n / slowest[1], n / slowest[2], 2 * n / slowest[3], link_bytes_per_s
    )
