"""What the GPUs can do, measured in the same processes at the same time: the rates in `device_limits`.

- copy: on the device, of as many bytes as the value has, 64 MiB at least, which are in no cache; by the first rank of
  each GPU, while the others that share it sleep. As many copies one behind the other as take a while, so that beginning
  one, some 10 us, costs nothing.
- down, up, both: copies from the device to page-locked host memory, back, and both at once in two streams; by all ranks
  at the same time.
- wait: a copy of 8 bytes, begun and waited for.

They take turns with the contenders that they are the limit of, as the probes of the host do (`probes`). Figures are
medians; that of the wait is its lowest tenth, as the ping-pong's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from mpikv.bench.device_limits import DeviceRates
from mpikv.bench.gpu import Gpu
from mpikv.bench.job import Job
from mpikv.bench.limits import Rates
from mpikv.bench.measure import Contender, Result
from mpikv.bench.probes import Probes, quiet_barrier
from mpikv.bench.statistics import median, undisturbed

LEAST_BYTES = 64 << 20  # below, beginning a copy is measured and not the memory
LEAST_S = 1e-3  # of copies in a row
MOST_COPIES = 256
WAITS = 10  # in each turn of the contenders
WAIT_BYTES = 8
DOWN, UP, BOTH = "probe: down", "probe: up", "probe: down and up"
DEVICE, WAIT = "probe: device copy", "probe: wait"


class DeviceProbes(Probes):
    """The probes of the host, and those of the GPU, for values of `n_bytes`. Collective. `close` gives memory back."""

    def __init__(
        self,
        job: Job,
        n_bytes: int,
        dtype: np.dtype[np.generic],
        gpu: Gpu,
        *,
        link_bytes_per_s: float | None = None,
        over: Job | None = None,
    ) -> None:
        super().__init__(job, n_bytes, dtype, link_bytes_per_s, over)
        self.device_rates: DeviceRates
        self._gpu = Gpu(gpu.driver)
        self._bytes = max(LEAST_BYTES, n_bytes)
        self._from, self._to = self._gpu.memory(self._bytes), self._gpu.memory(self._bytes)
        self._second = self._gpu.driver.stream()
        pinned = [gpu.driver.pinned(self._bytes) for _ in range(2)]
        for one in pinned:
            one.fill(0)
        self._pinned, (self._below, self._above) = pinned, (one.ctypes.data for one in pinned)
        self._copies_s: list[float] = []
        self._waits_s: list[float] = []
        sharing = job.comm.allgather((job.hosts[job.rank], gpu.driver.uuid))
        self._is_first = sharing.index(sharing[job.rank]) == job.rank
        self.ranks_per_gpu = max(map(sharing.count, sharing))
        self._copies = 1
        while self._is_first and self._copies < MOST_COPIES and self._in_a_row() < LEAST_S:
            self._copies *= 2

    def contenders(self) -> list[Contender]:
        """See `Probes`."""
        works = {DEVICE: self._copy_on_device, DOWN: self._down, UP: self._up, BOTH: self._both, WAIT: self._wait}
        return [*super().contenders(), *(Contender(what, self._gpu.finish, work) for what, work in works.items())]

    def rates(self, results: Mapping[str, Result]) -> Rates:
        """See `Probes`; `device_rates` is there then: of several GPUs those of the slowest. Collective."""
        comm, found = self._job.comm, super().rates(results)
        copies_s = comm.allgather(median(self._copies_s) / self._copies if self._is_first else 0.0)
        waits_s = comm.allgather(undisturbed(self._waits_s))
        down_s, up_s, both_s = (results[what].summary.median_s for what in (DOWN, UP, BOTH))
        self.device_rates = DeviceRates(
            found.latency_s,
            max(waits_s),
            self._bytes / max(copies_s),
            self._bytes / down_s,
            self._bytes / up_s,
            2 * self._bytes / both_s,
            self._link,
        )
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._gpu.close()

    def _in_a_row(self) -> float:
        start_s = time.perf_counter()
        for _ in range(self._copies):
            self._gpu.copy(self._to, self._from, self._bytes)
        self._gpu.finish(self._gpu.stream)
        return time.perf_counter() - start_s

    def _copy_on_device(self) -> None:
        if self._is_first:
            self._copies_s.append(self._in_a_row())
        quiet_barrier(self._job.comm)

    def _down(self) -> None:
        self._gpu.copy(self._below, self._from, self._bytes)
        self._gpu.finish(self._gpu.stream)

    def _up(self) -> None:
        self._gpu.copy(self._to, self._above, self._bytes)
        self._gpu.finish(self._gpu.stream)

    def _both(self) -> None:
        self._gpu.copy(self._below, self._from, self._bytes)
        self._gpu.copy(self._to, self._above, self._bytes, self._second)
        self._gpu.finish(self._gpu.stream, self._second)

    def _wait(self) -> None:
        for _ in range(WAITS):
            start_s = time.perf_counter()
            self._gpu.copy(self._to, self._from, WAIT_BYTES)
            self._gpu.finish(self._gpu.stream)
            self._waits_s.append(time.perf_counter() - start_s)
