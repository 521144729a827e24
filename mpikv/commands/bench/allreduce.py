"""`mpikv bench allreduce`, `pushpull` and `model`: arrays summed over the workers, beside raw MPI and Gloo.

allreduce: one array of each size, in place, by each algorithm that is asked for. pushpull: in place, out of place and
with an optimizer, whose arithmetic raw MPI has not; or with --keys many keys in one call. model: the gradients of a
network in one call, in the order in which a backward pass makes them. On GPUs, too, where every worker has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench import gloo
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.raw import mpi_can_add, packed_contender, raw_contender
from mpikv.commands.bench.report import SUMS
from mpikv.commands.bench.session import BenchRun
from mpikv.commands.bench.stores import GPU, StoreUse, gpu_everywhere, store_contender
from mpikv.commands.models import Shape, shapes


def run(session: BenchRun) -> None:
    """Measure what the options ask for. Collective, blocks."""
    options, itemsize = session.options, session.dtype.itemsize
    if options.kind == "model":
        cases: list[tuple[Shape, ...]] = [tuple(reversed(shapes(options.model)))]
    elif options.keys:
        number, n_bytes = options.keys
        cases = [((max(1, n_bytes // itemsize),),) * number]
    else:
        cases = [((n_bytes // itemsize,),) for n_bytes in session.sizes]
    if lists := len(cases[0]) > 1:
        n_bytes = sum(map(math.prod, cases[0])) * itemsize
        session.progress.say(f"# {len(cases[0])} arrays, {n_bytes} bytes")
    on_gpu = gpu_everywhere(session.job)
    titles(session)
    for case in cases:
        _compare(session, case, lists=lists, on_gpu=on_gpu)


def titles(session: BenchRun) -> None:
    """Print the titles of the table, and say why there is no raw MPI in it, if so."""
    session.titles(SUMS)
    if not mpi_can_add(session.dtype):
        session.note(f"no raw MPI: MPI libraries cannot add {session.dtype.name}")


def _compare(session: BenchRun, case: tuple[Shape, ...], *, lists: bool, on_gpu: bool) -> None:
    job = session.job
    pattern = Pattern(session.dtype, job.rank, job.size)
    arrays = [pattern.zeros(shape) for shape in case]
    use = StoreUse("ordinary", case, session.dtype, job.config.with_(num_servers=0), single=not lists)
    uses = [use]
    if session.options.kind == "pushpull" and not lists:
        uses = [
            replace(use, what="in place"),
            replace(use, what="out=", out=True),
            replace(use, what="sgd", optimizer="sgd"),
        ]
    shared = [one.where("shared", shared=True) for one in uses if not one.out]
    forced = [
        replace(use, what=algorithm, config=use.config.with_(algorithm=algorithm))
        for algorithm in session.options.algorithms
    ]
    on_gpus = [one.where(GPU, on_gpu=True, type_="dist_sync_device") for one in uses if on_gpu]
    made = [store_contender(session, one, pattern, arrays) for one in (*uses, *shared, *forced, *on_gpus)]
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
    if "gloo" in session.options.vs:
        made.append(gloo.contender(session.job, pattern, arrays))
    return made
