"""`mpikv bench link`: what the links do, and how near an allreduce comes to what they allow.

Three parts: pairs of ranks over MPI; raw TCP from each host to the next, whose smallest goodput is B; and an allreduce
of the store and of raw MPI against the ring bound 2(h-1)/h * S/B on h hosts. On a single host every rank counts as a
host and B is the loopback's: a scale, which shared memory may beat. --interface-counters adds what one exchange put on
each host's interfaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench import interfaces, pairs
from mpikv.commands.bench.allreduce import beside, sizes_of
from mpikv.commands.bench.job import Job
from mpikv.commands.bench.limits import Limit, Rates, ring_bound_s
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.probes import quiet_barrier
from mpikv.commands.bench.report import TABLE
from mpikv.commands.bench.session import Session
from mpikv.commands.bench.sizes import short
from mpikv.commands.bench.stores import Way, store_contender
from mpikv.commands.bench.tcp import goodput
from mpikv.commands.tables import Column, Table

REST_S = 0.02
COUNTERS = Table(
    Column("bytes", 9),
    Column("what", 20, left=True),
    Column("host", 16, left=True),
    Column("sent", 12),
    Column("received", 12),
    Column("sent/size", 10),
)


def run(session: Session) -> None:
    """Measure what the options ask for. Collective, blocks."""
    job = session.job
    measured = pairs.measure_pairs(job)
    session.titles(pairs.TABLE)
    session.lines(pairs.table_row, measured)
    rates_tcp = _tcp(session)
    slowest = min(entry["bytes_per_s"] for entry in rates_tcp)
    session.link_bytes_per_s = slowest if len(job.host_names) > 1 else None
    counters: list[dict[str, Any]] = []
    session.more = {"pairs": [asdict(pair) for pair in measured], "tcp": rates_tcp, "interfaces": counters}
    links = len(job.host_names) if len(job.host_names) > 1 else job.size
    session.note(f"limit: 2({links}-1)/{links} * bytes / {slowest * 8 / 1e6:.0f} Mbit/s")
    session.titles(TABLE)
    pattern = Pattern(session.dtype, job.rank, job.size)
    for n_bytes in sizes_of(session):
        probes = session.probes(n_bytes)
        made = _contenders(session, pattern, n_bytes)

        def bound(_rates: Rates, made: list[Contender] = made, n_bytes: int = n_bytes) -> dict[str, Limit]:
            limit = Limit(ring_bound_s(n_bytes, links, slowest), "link")
            return {contender.what: limit for contender in made}

        if session.options.interface_counters:
            counters += _count(session, made, n_bytes)
        session.compare(n_bytes, 1, made, probes, bound)
    _show_counters(session, counters, links)


def _tcp(session: Session) -> list[dict[str, Any]]:
    """Measure TCP from each host to the next; on one host from rank 0 to rank 1."""
    job = session.job
    ends = job.leaders() if len(job.host_names) > 1 else [0, 1]
    found = []
    for sender, receiver in zip(ends, ends[1:] + ends[:1], strict=True):
        rate = goodput(job, sender, receiver)
        found.append({"from": job.hosts[sender], "to": job.hosts[receiver], "bytes_per_s": rate})
        cells = ("raw TCP", f"{sender} -> {receiver}", "stream", "-", *pairs.in_units(rate))
        session.lines(lambda cells: pairs.TABLE.line(*cells), [cells])
    return found


def _contenders(session: Session, pattern: Pattern, n_bytes: int) -> list[Contender]:
    job, dtype = session.job, session.dtype
    array: HostArray = np.zeros(n_bytes // dtype.itemsize, dtype)
    way = Way("ordinary", (array.shape,), dtype, job.config.with_(num_servers=0), single=True)
    made = [store_contender(job, pattern, way, [array]), *beside(session, pattern, [array])]
    return [replace(contender, prepare=_rested(contender.prepare)) for contender in made]


def _rested(prepare: Callable[[], None]) -> Callable[[], None]:
    """Call `prepare`, and wait a moment, in which a shaped link's queue empties and its tokens come back."""

    def rested() -> None:
        prepare()
        time.sleep(REST_S)

    return rested


def _count(session: Session, contenders: Sequence[Contender], n_bytes: int) -> list[dict[str, Any]]:
    """Count what one exchange of each puts on each host's interfaces. Collective."""
    job = session.job
    found = []
    for contender in contenders:
        contender.prepare()
        contender.run()  # connections are made at the first message
        contender.prepare()
        quiet_barrier(job.comm)
        before = _traffic(job)
        quiet_barrier(job.comm)
        contender.run()
        quiet_barrier(job.comm)
        moved = _traffic(job).since(before)
        everywhere = job.comm.allgather(moved)
        found += [
            {"n_bytes": n_bytes, "what": contender.what, "host": job.hosts[leader], **everywhere[leader]._asdict()}
            for leader in job.leaders()
        ]
    return found


def _traffic(job: Job) -> interfaces.Traffic:
    return interfaces.now(loopback=len(job.host_names) == 1)


def _show_counters(session: Session, counters: Sequence[dict[str, Any]], links: int) -> None:
    """Print the bytes that crossed each host's interfaces, over the size, beside what the ring needs."""
    if not counters:
        return
    needed = 2 * (links - 1) / links
    session.progress.say(
        f"# bytes over each host's interfaces in one exchange, divided by the size (ring: {needed:.3f})"
    )
    session.titles(COUNTERS)
    session.lines(_counter_row, counters)


def _counter_row(one: dict[str, Any]) -> str:
    share = f"{one['sent'] / one['n_bytes']:.3f}"
    return COUNTERS.line(short(one["n_bytes"]), one["what"], one["host"], one["sent"], one["received"], share)
