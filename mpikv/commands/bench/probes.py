"""What this machine can do, measured in the same processes at the same time: the rates in `limits`.

Add, copy and together: exactly the additions and copies of one allreduce of this size, on private memory and with all
ranks at work at the same time, without any waiting for each other in between; first all additions or copies alone, then
piece by piece, so that what was added is copied while it lies in a core's cache. They take turns with the contenders
that they are the limit of, so that a noisy neighbour hits them alike. So does a ping-pong between rank 0 and the rank
farthest from it. Figures are medians of the slowest rank; of the ping-pong its lowest tenth. Links between hosts are
measured once, before (`link`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.limits import Rates
from mpikv.commands.bench.link import lowest_tenth, round_trips
from mpikv.commands.bench.measure import Contender

LEAST_CHUNK_BYTES = 16 << 10  # below, NumPy's calls and not the memory are measured
PIECE_BYTES = 256 << 10  # of each array: two fit into a core's second-level cache, and NumPy's calls cost nothing
PING_TURNS = 10  # in each turn of the contenders
ADD, COPY, TOGETHER, PING = "probe: add", "probe: copy", "probe: add and copy", "probe: ping-pong"


class Probes:
    """The probes for values of `n_bytes`: contenders to be measured with others, and the rates that follow."""

    def __init__(self, job: BenchJob, n_bytes: int, dtype: np.dtype[np.generic]) -> None:
        sources = max(1, job.ranks_per_host - 1)
        elems = max(LEAST_CHUNK_BYTES, n_bytes // job.ranks_per_host) // dtype.itemsize
        self._job, self._pings = job, list[float]()
        self._own = np.ones(elems, dtype)
        self._others = np.ones((sources, elems), dtype)

    def contenders(self) -> list[Contender]:
        """Return the contenders to be measured with the others."""
        works = {ADD: self._add, COPY: self._copy, TOGETHER: self._together}
        made = [Contender(what, work, self._fill) for what, work in works.items()]
        return [*made, Contender(PING, self._ping)] if self._job.size > 1 else made

    def rates(self, medians_s: Mapping[str, float], link_bytes_per_s: float | None) -> Rates:
        """Return the rates that follow. medians_s: by the names of `contenders`. Collective."""
        moved, latency_s = self._others.nbytes, self._job.comm.bcast(lowest_tenth(self._pings))
        add_s, copy_s, together_s = (medians_s[what] for what in (ADD, COPY, TOGETHER))
        return Rates(latency_s, moved / add_s, moved / copy_s, 2 * moved / together_s, link_bytes_per_s)

    def _fill(self) -> None:
        # As the contenders' arrays are: written by this rank just before.
        self._own.fill(1)
        self._others.fill(1)

    def _add(self) -> None:
        for other in self._others:
            np.add(self._own, other, out=self._own)

    def _copy(self) -> None:
        for other in self._others:
            other[...] = self._own

    def _ping(self) -> None:
        far = next((rank for rank, host in enumerate(self._job.hosts) if host != self._job.hosts[0]), 1)
        self._pings += round_trips(self._job, 0, far, PING_TURNS)
        if self._job.size > 2:
            self._job.quiet_barrier()  # the others may share a core with these two

    def _together(self) -> None:
        step = PIECE_BYTES // self._own.itemsize
        for first in range(0, self._own.size, step):
            own, others = self._own[first : first + step], self._others[:, first : first + step]
            for other in others:
                np.add(own, other, out=own)
            for other in others:
                other[...] = own
