"""`mpikv bench pushpull`: one exchange in place, with out=, and with an optimizer; or many keys in one call.

Raw MPI does the sum alone, in place: it is the scale, not the same work, where there is an optimizer or an `out`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench import device
from mpikv.commands.bench.allreduce import beside, compare_sizes, plain, sizes_of
from mpikv.commands.bench.lists import compare_lists
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.session import Session
from mpikv.commands.bench.stores import Way, store_contender


def run(session: Session) -> None:
    """Measure what the options ask for. Collective."""
    options = session.options
    if options.keys:
        compare_lists(session, ((max(1, options.key_bytes // session.dtype.itemsize),),) * options.keys)
    elif options.device:
        device.compare_sizes(session, sizes_of(session), lambda shape: _variants(session, shape))
    else:
        compare_sizes(session, _contenders)


def _variants(session: Session, shape: tuple[int, ...]) -> list[Way]:
    """Return the exchange of one array in place, out of place and with an optimizer."""
    way = plain(session, shape, "in place")
    return [way, replace(way, what="out=", out=True), replace(way, what="sgd", optimizer="sgd")]


def _contenders(session: Session, pattern: Pattern, n_bytes: int) -> list[Contender]:
    job, dtype = session.job, session.dtype
    array: HostArray = np.zeros(n_bytes // dtype.itemsize, dtype)
    ways = _variants(session, array.shape)
    made = [store_contender(job, pattern, way, [array]) for way in ways]
    shared = [replace(way, what=f"shared, {way.what}", shared=True) for way in (ways[0], ways[2])]
    made += [store_contender(job, pattern, way) for way in shared]
    return made + beside(session, pattern, [array])
