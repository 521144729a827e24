"""Two ranks by themselves: latency and one-way bandwidth over MPI, for each class of pair.

A class is "same host" (two ranks of the host with most) or "other host" (the first ranks of two hosts). Latency is half
a round trip; bandwidth is that of messages of one size sent one after another, with the last one acknowledged. The
other ranks sleep meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from mpikv.commands.bench.job import Job
from mpikv.commands.bench.probes import TAG, ping_pong, quiet_barrier
from mpikv.commands.bench.sizes import short
from mpikv.commands.bench.statistics import GIGA, median
from mpikv.commands.tables import Column, Table

SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 4 << 20)
STREAM_BYTES = 16 << 20  # in one measurement of bandwidth
STREAM_TURNS = 3
MOST_MESSAGES = 1000
SMALL_TURNS, LARGE_TURNS, LARGE_BYTES = 100, 10, 256 << 10


@dataclass(frozen=True)
class Pair:
    """What was measured for one class and size."""

    which: str
    first: int
    second: int
    n_bytes: int
    latency_s: float
    bytes_per_s: float


def classes(hosts: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return a pair of ranks for each class that there is. hosts: of each rank."""
    found = {}
    most = max(dict.fromkeys(hosts), key=hosts.count)
    same = [rank for rank, host in enumerate(hosts) if host == most]
    if len(same) > 1:
        found["same host"] = (same[0], same[1])
    other = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    if other is not None:
        found["other host"] = (0, other)
    return found


def measure_pairs(job: Job) -> list[Pair]:
    """Measure all classes and sizes. Collective."""
    return [
        Pair(
            which,
            first,
            second,
            n_bytes,
            ping_pong(job.comm, first, second, n_bytes, SMALL_TURNS if n_bytes < LARGE_BYTES else LARGE_TURNS),
            one_way(job, first, second, n_bytes),
        )
        for which, (first, second) in classes(job.hosts).items()
        for n_bytes in SIZES
    ]


def one_way(job: Job, first: int, second: int, n_bytes: int) -> float:
    """Return the bytes per second from `first` to `second`, the median of several streams, on all ranks. Collective."""
    data, done = np.ones(n_bytes, np.uint8), np.empty(1, np.uint8)
    messages = min(MOST_MESSAGES, max(1, STREAM_BYTES // n_bytes))
    rates = []
    quiet_barrier(job.comm)
    for _ in range(STREAM_TURNS):
        start_s = time.perf_counter()
        if job.rank == first:
            for _ in range(messages):
                job.comm.Send(data, second, TAG)
            job.comm.Recv(done, second, TAG)
        elif job.rank == second:
            for _ in range(messages):
                job.comm.Recv(data, first, TAG)
            job.comm.Send(done, first, TAG)
        rates.append(messages * n_bytes / (time.perf_counter() - start_s))
    quiet_barrier(job.comm)
    rate: float = job.comm.bcast(median(rates), first)
    return rate


TABLE = Table(
    Column("pair", 12, left=True),
    Column("ranks", 9),
    Column("bytes", 8),
    Column("one way us", 12),
    Column("GB/s", 9),
    Column("Mbit/s", 10),
)


def table_row(pair: Pair) -> str:
    """Return one line."""
    ends, one_way_us = f"{pair.first} -> {pair.second}", f"{pair.latency_s * 1e6:.2f}"
    return TABLE.line(pair.which, ends, short(pair.n_bytes), one_way_us, *in_units(pair.bytes_per_s))


def in_units(bytes_per_s: float) -> tuple[str, str]:
    """Return a rate in the units of the last two columns."""
    return f"{bytes_per_s / GIGA:.3f}", f"{bytes_per_s * 8 / 1e6:.0f}"
