"""`mpikv bench link`: what the links between ranks do, over MPI.

A pair of ranks measures by itself, while the others sleep: the latency, half a round trip of 8 bytes; and the rate of a
stream in one direction, of messages of 1 MiB of which several are under way. Streams double until one takes long enough
to be measured: by then the connection is there and has found its speed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.report import write_json
from mpikv.commands.bench.session import BenchRun
from mpikv.commands.tables import Column, Table
from mpikv.placement.links import in_ring, to_json

if TYPE_CHECKING:
    from mpi4py import MPI

PING_BYTES, PING_TURNS, WARM_TURNS = 8, 100, 20
STREAM_BYTES, WINDOW, LEAST_S, MOST_MESSAGES = 1 << 20, 8, 0.5, 1 << 14
TAG = 7

LINKS = Table(
    Column("link", 12, left=True, text=lambda row: row["which"]),
    Column("ranks", 9, text=lambda row: f"{row['first']} -> {row['second']}"),
    Column("latency us", 12, text=lambda row: f"{row['latency_s'] * 1e6:.2f}"),
    Column("GB/s", 9, text=lambda row: f"{row['bytes_per_s'] / 1e9:.3f}"),
    Column("Mbit/s", 10, text=lambda row: f"{row['bytes_per_s'] * 8 / 1e6:.0f}"),
)


def run(session: BenchRun) -> None:
    """Measure all of `pairs`, and write the links between hosts where that is asked for. Collective, blocks."""
    job, file = session.job, session.options.save
    session.titles(LINKS)
    for first, second in pairs(job):
        job.quiet_barrier()
        here = (0.0, 0.0)
        if job.rank in (first, second):
            here = _latency_s(job, first, second), _stream(job, first, second)
        job.quiet_barrier()
        latency_s, bytes_per_s = job.comm.bcast(here, first)
        which = "same host" if job.hosts[first] == job.hosts[second] else "other host"
        row = {"which": which, "first": first, "second": second, "latency_s": latency_s, "bytes_per_s": bytes_per_s}
        session.add(LINKS, [row])
    if file and job.rank == 0:
        between = [row for row in session.rows if row["which"] == "other host"]
        rates = in_ring(
            [job.hosts[row["first"]] for row in between],
            [row["bytes_per_s"] for row in between],
            [row["latency_s"] for row in between],
        )
        write_json(file, to_json(rates))
        session.note(f"links {rates}; written for MPIKV_LINK={Path(file).resolve()}")


def pairs(job: BenchJob) -> list[tuple[int, int]]:
    """Return two ranks of the host with most, if it has two, and the first rank of each host with that of the next."""
    most = max(job.host_names, key=job.hosts.count)
    same = [rank for rank, host in enumerate(job.hosts) if host == most][:2]
    leaders = [job.hosts.index(host) for host in job.host_names]
    between = list(zip(leaders, leaders[1:] + leaders[:1], strict=True)) if len(leaders) > 1 else []
    return [(same[0], same[1]), *between] if len(same) > 1 else between


def _latency_s(job: BenchJob, first: int, second: int) -> float:
    """Return half a round trip, on these two ranks.

    The 10th percentile: a peer that lost its core for a moment costs as much as a thousand round trips.
    """
    data, times = np.zeros(PING_BYTES, np.uint8), []
    for _ in range(WARM_TURNS + PING_TURNS):
        start_s = time.perf_counter()
        if job.rank == first:
            job.comm.Send(data, second, TAG)
            job.comm.Recv(data, second, TAG)
        else:
            job.comm.Recv(data, first, TAG)
            job.comm.Send(data, first, TAG)
        times.append((time.perf_counter() - start_s) / 2)
    return float(np.percentile(times[WARM_TURNS:], 10))


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
