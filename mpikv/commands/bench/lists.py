"""Many arrays in one `pushpull`: `mpikv bench pushpull --keys`, and `model`, the gradients of a network."""

from __future__ import annotations

import math

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench import device
from mpikv.commands.bench.allreduce import beside, titles
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.session import Session
from mpikv.commands.bench.stores import Way, store_contender
from mpikv.commands.models import Shape, shapes


def run_model(session: Session) -> None:
    """All gradients, in the order in which a backward pass makes them. Collective."""
    compare_lists(session, tuple(reversed(shapes(session.options.model))))


def compare_lists(session: Session, shapes: tuple[Shape, ...]) -> None:
    """Measure one call with all arrays, ordinary and shared, beside raw MPI, packed raw MPI and Gloo. Collective."""
    job, dtype = session.job, session.dtype
    n_bytes = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    session.progress.say(f"# {len(shapes)} arrays, {n_bytes} bytes")
    config = job.config.with_(num_servers=0)
    if session.options.device:
        device.compare_lists(session, Way("", shapes, dtype, config))
        return
    titles(session)
    probes = session.probes(n_bytes)
    pattern = Pattern(dtype, job.rank, job.size)
    arrays: list[HostArray] = [np.zeros(shape, dtype) for shape in shapes]
    made = [store_contender(job, pattern, Way("ordinary", shapes, dtype, config), arrays)]
    made.append(store_contender(job, pattern, Way("shared", shapes, dtype, config, shared=True)))
    made += beside(session, pattern, arrays, packed=True)
    session.compare(n_bytes, len(shapes), made, probes)
