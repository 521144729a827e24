"""`mpikv bench allreduce`: one array summed over the ranks, in place, for a sweep of sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench import device, gloo
from mpikv.commands.bench.job import mpi_can_add
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.raw import packed_contender, raw_contender
from mpikv.commands.bench.report import TABLE
from mpikv.commands.bench.session import Session
from mpikv.commands.bench.sizes import sweep
from mpikv.commands.bench.stores import Way, forced, store_contender


def sizes_of(session: Session) -> list[int]:
    """Return the sizes of the sweep."""
    options = session.options
    return sweep(options.min_bytes, options.max_bytes, options.factor, session.dtype.itemsize)


def titles(session: Session) -> None:
    """Print the titles of the table, and say why there is no raw MPI in it, if so."""
    session.titles(TABLE)
    if not mpi_can_add(session.dtype):
        session.note(f"no raw MPI: MPI libraries cannot add {session.dtype.name}")


def run(session: Session) -> None:
    """Measure what the options ask for. Collective, blocks."""
    if session.options.device:
        device.compare_sizes(session, sizes_of(session), lambda shape: [plain(session, shape)])
    else:
        compare_sizes(session, _contenders)


def compare_sizes(session: Session, contenders: Callable[[Session, Pattern, int], list[Contender]]) -> None:
    """Measure one array of each size of the sweep. Collective, blocks.

    contenders(session, pattern, n_bytes): makes those that take turns.
    """
    titles(session)
    pattern = Pattern(session.dtype, session.job.rank, session.job.size)
    for n_bytes in sizes_of(session):
        probes = session.probes(n_bytes)
        session.compare(n_bytes, 1, contenders(session, pattern, n_bytes), probes)


def plain(session: Session, shape: tuple[int, ...], what: str = "") -> Way:
    """Return the way of one array, pushed and pulled in place, without servers."""
    return Way(what, (shape,), session.dtype, session.job.config.with_(num_servers=0), single=True)


def _contenders(session: Session, pattern: Pattern, n_bytes: int) -> list[Contender]:
    """Make the contenders, all on the same ordinary array, except the one with a shared array."""
    job, dtype = session.job, session.dtype
    array: HostArray = np.zeros(n_bytes // dtype.itemsize, dtype)
    way = plain(session, array.shape, "ordinary")
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
