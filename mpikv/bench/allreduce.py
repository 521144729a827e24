"""`mpikv bench allreduce`: one array summed over the ranks, in place, for a sweep of sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpikv.arrays import HostArray
from mpikv.bench import gloo
from mpikv.bench.job import mpi_can_add
from mpikv.bench.measure import Contender
from mpikv.bench.pattern import Pattern
from mpikv.bench.raw import packed_contender, raw_contender
from mpikv.bench.report import TABLE
from mpikv.bench.session import Session
from mpikv.bench.sizes import sweep
from mpikv.bench.stores import Way, forced, store_contender


def sizes_of(session: Session) -> list[int]:
    """The sizes of the sweep."""
    options = session.options
    return sweep(options.min_bytes, options.max_bytes, options.factor, session.dtype.itemsize)


def titles(session: Session) -> None:
    """Of the table, and why there is no raw MPI in it."""
    session.titles(TABLE)
    if not mpi_can_add(session.dtype):
        session.note(f"no raw MPI: MPI libraries cannot add {session.dtype.name}")


def run(session: Session) -> None:
    """Collective."""
    compare_sizes(session, _contenders)


def compare_sizes(session: Session, contenders: Callable[[Session, Pattern, int], list[Contender]]) -> None:
    """One array of each size of the sweep. contenders(session, pattern, n_bytes): who takes turns. Collective."""
    titles(session)
    pattern = Pattern(session.dtype, session.job.rank, session.job.size)
    for n_bytes in sizes_of(session):
        probes = session.probes(n_bytes)
        session.compare(n_bytes, 1, contenders(session, pattern, n_bytes), probes)


def _contenders(session: Session, pattern: Pattern, n_bytes: int) -> list[Contender]:
    """All on the same ordinary array, the shared one excepted."""
    job, dtype = session.job, session.dtype
    array: HostArray = np.zeros(n_bytes // dtype.itemsize, dtype)
    way = Way("ordinary", (array.shape,), dtype, job.config.with_(num_servers=0), single=True)
    made = [store_contender(job, pattern, way, [array])]
    shared = Way("shared", way.shapes, dtype, way.config, shared=True, single=True)
    made.append(store_contender(job, pattern, shared))
    for algorithm in session.options.algorithms:
        made.append(store_contender(job, pattern, forced(way, algorithm), [array]))
    return made + beside(session, pattern, [array])


def beside(session: Session, pattern: Pattern, arrays: list[HostArray], *, packed: bool = False) -> list[Contender]:
    """Raw MPI where it can add these, Gloo where it is asked for. packed: raw MPI in one buffer, too. Collective."""
    made = []
    if mpi_can_add(session.dtype):
        made.append(raw_contender(session.job, pattern, arrays))
        if packed:
            made.append(packed_contender(session.job, pattern, arrays))
    if "gloo" in getattr(session.options, "vs", ()):
        made.append(gloo.contender(session.job, pattern, arrays))
    return made
