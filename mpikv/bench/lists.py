"""Many arrays in one `pushpull`: what `pushpull --keys` and `model` have in common."""

from __future__ import annotations

import math

import numpy as np

from mpikv.arrays import HostArray
from mpikv.bench import gloo
from mpikv.bench.allreduce import NO_RAW
from mpikv.bench.job import mpi_can_add
from mpikv.bench.pattern import Pattern
from mpikv.bench.raw import packed_contender, raw_contender
from mpikv.bench.report import TABLE
from mpikv.bench.session import Session
from mpikv.bench.stores import Way, store_contender
from mpikv.models import Shape


def compare_lists(session: Session, shapes: tuple[Shape, ...]) -> None:
    """Measure one call with all arrays, ordinary and shared, beside raw MPI, packed raw MPI and Gloo. Collective."""
    job, dtype = session.job, session.dtype
    n_bytes = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    session.progress.say(f"# {len(shapes)} arrays, {n_bytes} bytes")
    session.titles(TABLE)
    probes = session.probes(n_bytes)
    pattern = Pattern(dtype, job.rank, job.size)
    arrays: list[HostArray] = [np.zeros(shape, dtype) for shape in shapes]
    config = job.config.with_(num_servers=0)
    made = [store_contender(job, pattern, Way("ordinary", shapes, dtype, config), arrays)]
    made.append(store_contender(job, pattern, Way("shared", shapes, dtype, config, shared=True)))
    if mpi_can_add(dtype):
        made += [raw_contender(job, pattern, arrays), packed_contender(job, pattern, arrays)]
    else:
        session.note(NO_RAW.format(dtype=dtype.name))
    if "gloo" in session.options.vs:
        made.append(gloo.contender(job, pattern, arrays))
    session.compare(n_bytes, len(shapes), made, probes)
