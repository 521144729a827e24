"""`mpikv bench allreduce`, `pushpull` and `model`: arrays summed over the workers, beside raw MPI and Gloo.

allreduce: one array of each size, in place, by each algorithm that is asked for. pushpull: in place, out of place and
with an optimizer, whose arithmetic raw MPI has not; or with --keys many keys in one call. model: the gradients of a
network in one call, in the order in which a backward pass makes them. With --device arrays are on GPUs (`device`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench import device, gloo
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.raw import mpi_can_add, packed_contender, raw_contender
from mpikv.commands.bench.report import SUMS
from mpikv.commands.bench.session import BenchRun
from mpikv.commands.bench.stores import StoreUse, store_contender
from mpikv.commands.models import Shape, shapes


def run(session: BenchRun) -> None:
    """Measure what the options ask for. Collective, blocks."""
    options = session.options
    if options.kind == "model":
        cases: list[tuple[Shape, ...]] = [tuple(reversed(shapes(options.model)))]
    elif getattr(options, "keys", None):
        cases = [((max(1, options.key_bytes // session.dtype.itemsize),),) * options.keys]
    else:
        cases = [((n_bytes // session.dtype.itemsize,),) for n_bytes in session.sizes]
    lists = len(cases) == 1 and len(cases[0]) > 1
    if lists:
        n_bytes = sum(math.prod(shape) for shape in cases[0]) * session.dtype.itemsize
        session.progress.say(f"# {len(cases[0])} arrays, {n_bytes} bytes")
    if options.device:
        device.compare_cases(session, [uses_of(session, case, lists=lists) for case in cases])
        return
    titles(session)
    for case in cases:
        _compare(session, case, lists=lists)


def titles(session: BenchRun) -> None:
    """Print the titles of the table, and say why there is no raw MPI in it, if so."""
    session.titles(SUMS)
    if not mpi_can_add(session.dtype):
        session.note(f"no raw MPI: MPI libraries cannot add {session.dtype.name}")


def uses_of(session: BenchRun, case: tuple[Shape, ...], *, lists: bool) -> list[StoreUse]:
    """Return the uses of the store with the user's own arrays that are compared."""
    use = StoreUse("", case, session.dtype, session.job.config.with_(num_servers=0), single=not lists)
    if session.options.kind != "pushpull" or lists:
        return [use]
    return [
        replace(use, what="in place"),
        replace(use, what="out=", out=True),
        replace(use, what="sgd", optimizer="sgd"),
    ]


def _compare(session: BenchRun, case: tuple[Shape, ...], *, lists: bool) -> None:
    """Measure one call with all arrays of a case, in host memory. Collective."""
    job, dtype = session.job, session.dtype
    pattern = Pattern(dtype, job.rank, job.size)
    arrays = [pattern.zeros(shape) for shape in case]
    uses = [replace(use, what=use.what or "ordinary") for use in uses_of(session, case, lists=lists)]
    shared = [
        replace(use, what="shared" if use.what == "ordinary" else f"shared, {use.what}", shared=True)
        for use in uses
        if not use.out
    ]
    forced = [
        replace(uses[0], what=algorithm, config=uses[0].config.with_(algorithm=algorithm))
        for algorithm in getattr(session.options, "algorithms", ())
    ]
    made = [store_contender(job, pattern, use, None if use.shared else arrays) for use in (*uses, *shared, *forced)]
    made += beside(session, pattern, arrays, packed=lists)
    session.compare(sum(array.nbytes for array in arrays), len(case), made)


def beside(
    session: BenchRun, pattern: Pattern, arrays: Sequence[HostArray], *, packed: bool = False
) -> list[Contender]:
    """Raw MPI where it can add these, Gloo where it is asked for. packed: raw MPI in one buffer, too. Collective."""
    made = []
    if mpi_can_add(session.dtype):
        made.append(raw_contender(session.job, pattern, arrays))
        if packed:
            made.append(packed_contender(session.job, pattern, arrays))
    if "gloo" in getattr(session.options, "vs", ()):
        made.append(gloo.contender(session.job, pattern, arrays))
    return made
