"""What the links between ranks do, over MPI; also `mpikv bench link`.

A pair of ranks measures by itself, while the others sleep: the latency, half a round trip of 8 bytes; and the rate of a
stream in one direction, of messages of 1 MiB of which several are under way. Streams double until one takes long enough
to be measured: by then the connection is there and has found its speed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpikv.commands.bench.job import BenchJob
from mpikv.placement.links import LinkRates, in_ring

if TYPE_CHECKING:
    from mpi4py import MPI

PING_BYTES, PING_TURNS, WARM_TURNS = 8, 100, 20
STREAM_BYTES, WINDOW, LEAST_S, MOST_MESSAGES = 1 << 20, 8, 0.5, 1 << 14
TAG = 7


class MeasuredLink(NamedTuple):
    """From one rank to another. which: "same host" or "other host"."""

    which: str
    first: int
    second: int
    latency_s: float
    bytes_per_s: float


def pairs(job: BenchJob) -> list[tuple[int, int]]:
    """Return two ranks of the host with most, if it has two, and the first rank of each host with that of the next."""
    most = max(job.host_names, key=job.hosts.count)
    same = [rank for rank, host in enumerate(job.hosts) if host == most][:2]
    leaders = job.leaders()
    between = list(zip(leaders, leaders[1:] + leaders[:1], strict=True)) if len(leaders) > 1 else []
    return [(same[0], same[1]), *between] if len(same) > 1 else between


def measured(job: BenchJob, *, within_hosts: bool) -> list[MeasuredLink]:
    """Measure all of `pairs`, but streams within a host only where that is asked for. Collective, blocks."""
    found = []
    for first, second in pairs(job):
        which = "same host" if job.hosts[first] == job.hosts[second] else "other host"
        job.quiet_barrier()
        here = (0.0, 0.0)
        if job.rank in (first, second):
            latency_s = lowest_tenth(round_trips(job, first, second, PING_TURNS + WARM_TURNS)[WARM_TURNS:])
            here = latency_s, _stream(job, first, second) if within_hosts or which == "other host" else 0.0
        job.quiet_barrier()
        found.append(MeasuredLink(which, first, second, *job.comm.bcast(here, first)))
    return found


def rates_of(job: BenchJob, links: Sequence[MeasuredLink]) -> LinkRates:
    """Return what stores need to know of the links between hosts, of which there are at least two."""
    between = [one for one in links if one.which == "other host"]
    return in_ring(
        [job.hosts[one.first] for one in between],
        [one.bytes_per_s for one in between],
        [one.latency_s for one in between],
    )


def round_trips(job: BenchJob, first: int, second: int, turns: int) -> list[float]:
    """Return halves of round trips, in seconds, on these two ranks; others do nothing."""
    data, times = np.zeros(PING_BYTES, np.uint8), []
    for _ in range(turns):
        start_s = time.perf_counter()
        if job.rank == first:
            job.comm.Send(data, second, TAG)
            job.comm.Recv(data, second, TAG)
        elif job.rank == second:
            job.comm.Recv(data, first, TAG)
            job.comm.Send(data, first, TAG)
        times.append((time.perf_counter() - start_s) / 2)
    return times


def lowest_tenth(times_s: list[float]) -> float:
    """Return the 10th percentile: a peer that lost its core for a moment costs as much as a thousand round trips."""
    return float(np.percentile(times_s, 10)) if times_s else 0.0


def _stream(job: BenchJob, first: int, second: int) -> float:
    """Return the bytes per second from `first` to `second`, on `first`."""
    buffers = [np.ones(STREAM_BYTES, np.uint8) for _ in range(WINDOW)]
    start = job.comm.Isend if job.rank == first else job.comm.Irecv
    peer, messages, spent_s = second if job.rank == first else first, 1, 0.0
    while spent_s < LEAST_S and messages < MOST_MESSAGES:
        messages *= 2
        start_s = time.perf_counter()
        requests: list[MPI.Request] = []
        for i in range(messages):
            if i >= WINDOW:
                requests[i - WINDOW].Wait()
            requests.append(start(buffers[i % WINDOW], peer, TAG))
        for request in requests[-WINDOW:]:
            request.Wait()
        job.comm.sendrecv(None, peer, TAG, source=peer, recvtag=TAG)  # all has come
        spent_s = time.perf_counter() - start_s
        if job.rank == first:
            job.comm.send(spent_s, peer, TAG)
        else:
            spent_s = job.comm.recv(source=peer, tag=TAG)  # both must go on, or end
    return messages * STREAM_BYTES / spent_s
