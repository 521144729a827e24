"""What this machine can do, measured in the same processes at the same time: the rates in `limits`.

- latency: half the round trip of 8 bytes by MPI_Send and MPI_Recv, between rank 0 and the rank farthest from it (the
  first on another host, else rank 1). The other ranks sleep meanwhile: they may share its core.
- add, copy and together: exactly the additions and copies of one allreduce of this size, on private memory and with all
  ranks at work at the same time, without any waiting for each other in between; first all additions or copies alone,
  then piece by piece, so that what was added is copied while it lies in a core's cache.

Additions, copies and ping-pong take turns with the contenders that they are the limit of, so that a noisy neighbour
hits them alike. The links between hosts are measured once, before (`tcp`). Figures are medians, of additions and copies
those of the slowest rank; of the ping-pong it is the lowest tenth, since a peer that lost its core to another process
for a moment costs as much as a thousand round trips.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mpikv.commands.bench.job import Job
from mpikv.commands.bench.limits import Rates
from mpikv.commands.bench.measure import Contender, Result
from mpikv.commands.bench.statistics import undisturbed

if TYPE_CHECKING:
    from mpi4py import MPI

PING_TURNS = 10  # in each turn of the contenders
PING_BYTES = 8
NAP_S = 2e-4
LEAST_CHUNK_BYTES = 16 << 10  # below, NumPy's calls and not the memory are measured
TAG = 7
PIECE_BYTES = 256 << 10  # of each array: two fit into a core's second-level cache, and NumPy's calls cost nothing
ADD, COPY, TOGETHER, PING = "probe: add", "probe: copy", "probe: add and copy", "probe: ping-pong"


class Probes:
    """The probes for values of `n_bytes`: contenders to be measured with others, and the rates that follow. Collective.

    link_bytes_per_s: of the links between hosts, None on one host. over: the job whose latency counts, by default this
    one; its other ranks call `latency` meanwhile.
    """

    def __init__(
        self,
        job: Job,
        n_bytes: int,
        dtype: np.dtype[np.generic],
        link_bytes_per_s: float | None = None,
        over: Job | None = None,
    ) -> None:
        self._job = job
        sources = max(1, job.ranks_per_host - 1)
        elems = max(LEAST_CHUNK_BYTES, n_bytes // job.ranks_per_host) // dtype.itemsize
        self._own = np.ones(elems, dtype)
        self._others = np.ones((sources, elems), dtype)
        self._pings: list[float] = []
        self._far = farthest(job.hosts)
        self._link = link_bytes_per_s
        self._latency_s = None if over is None else latency(over)

    def contenders(self) -> list[Contender]:
        """Return the contenders to be measured with the others."""
        works = {ADD: self._add, COPY: self._copy, TOGETHER: self._together}
        made = [Contender(what, self._fill, work) for what, work in works.items()]
        if self._latency_s is None and self._job.size > 1:
            made.append(Contender(PING, lambda: None, self._ping))
        return made

    def rates(self, results: Mapping[str, Result]) -> Rates:
        """Return the rates that follow. results: by the names of `contenders`. Collective."""
        moved = self._others.nbytes
        latency_s = self._latency_s
        if latency_s is None:
            latency_s = self._job.comm.bcast(undisturbed(self._pings))
        add_s, copy_s, together_s = (results[what].summary.median_s for what in (ADD, COPY, TOGETHER))
        return Rates(latency_s, moved / add_s, moved / copy_s, 2 * moved / together_s, self._link)

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

    def _together(self) -> None:
        step = PIECE_BYTES // self._own.itemsize
        for first in range(0, self._own.size, step):
            own, others = self._own[first : first + step], self._others[:, first : first + step]
            for other in others:
                np.add(own, other, out=own)
            for other in others:
                other[...] = own

    def _ping(self) -> None:
        comm, data = self._job.comm, np.zeros(PING_BYTES, np.uint8)
        self._pings += round_trips(comm, 0, self._far, data, PING_TURNS)
        if self._job.size > 2:
            quiet_barrier(comm)


def farthest(hosts: tuple[str, ...]) -> int:
    """Return the first rank on another host than rank 0, else rank 1."""
    return next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)


def round_trips(
    comm: MPI.Intracomm, first: int, second: int, data: np.ndarray[tuple[int], np.dtype[np.uint8]], turns: int
) -> list[float]:
    """Return halves of round trips of `data`, in seconds, on `first`; on other ranks nothing."""
    times, rank = [], comm.Get_rank()
    for _ in range(turns):
        if rank == first:
            start_s = time.perf_counter()
            comm.Send(data, second, TAG)
            comm.Recv(data, second, TAG)
            times.append((time.perf_counter() - start_s) / 2)
        elif rank == second:
            comm.Recv(data, first, TAG)
            comm.Send(data, first, TAG)
    return times


def ping_pong(comm: MPI.Intracomm, first: int, second: int, n_bytes: int, turns: int) -> float:
    """Return the usual time of one way between two ranks, on all ranks. Collective; the others sleep."""
    quiet_barrier(comm)
    times = round_trips(comm, first, second, np.zeros(n_bytes, np.uint8), turns + turns // 5)
    quiet_barrier(comm)
    way_s: float = comm.bcast(undisturbed(times[turns // 5 :]), first)
    return way_s


def latency(job: Job, turns: int = 100) -> float:
    """Return the time of one way between the two ranks that are farthest apart, in seconds. Collective."""
    return 0.0 if job.size == 1 else ping_pong(job.comm, 0, farthest(job.hosts), PING_BYTES, turns)


def quiet_barrier(comm: MPI.Intracomm) -> None:
    """Wait for all ranks, asleep. Collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(NAP_S)
