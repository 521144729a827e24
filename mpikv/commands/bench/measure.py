"""Timing several contenders side by side.

In every iteration each contender runs once, in an order that is drawn anew (the same on all ranks), so that a noisy
neighbour, a slow clock and what the one before left in the caches hit all alike. Before each run the contender's arrays
are filled and all ranks meet in a barrier; afterwards the result is checked. Neither is timed. The time of one
iteration is that of the slowest rank, found after the last iteration by one MPI_Allreduce(MAX) over all times.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

MIN_ITERATIONS, MAX_ITERATIONS = 5, 2000
WARMUP = 3  # rounds that are not timed: connections are made, forms are chosen, memory is touched


@dataclass
class Contender:
    """One way of doing the work. `run` alone is timed; all are collective.

    prepare: fill the arrays. check: whether the result is exact. close: give everything back. counts: what one run in
    the steady state sends and copies, on the rank with most; empty where it cannot be counted.
    """

    what: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    check: Callable[[], bool] = lambda: True
    close: Callable[[], object] = lambda: None
    counts: Callable[[], Mapping[str, int | None]] = dict


class Measured(NamedTuple):
    """What became of one contender.

    Times in seconds, each the slowest rank's. wrong: results that were not exact, over all ranks and iterations.
    """

    what: str
    iterations: int
    median_s: float
    p95_s: float
    min_s: float
    max_s: float
    wrong: int


def measure(
    comm: MPI.Intracomm, contenders: Sequence[Contender], *, seconds: float, iterations: int | None = None
) -> list[Measured]:
    """Run all contenders, warm-up first. Collective over `comm`.

    iterations: None: as many as fit into `seconds`, fills and checks included.
    """
    from mpi4py import MPI  # noqa: PLC0415 - it initialises MPI

    wrong = np.zeros(len(contenders), np.int64)
    round_s = 0.0
    for turn in range(WARMUP):
        start_s = time.perf_counter()
        _round(comm, contenders, turn, wrong)
        round_s = time.perf_counter() - start_s
    iterations = iterations or comm.bcast(iterations_for(seconds, round_s))
    times = np.empty((iterations, len(contenders)))
    gc.collect()
    for turn in range(iterations):
        times[turn] = _round(comm, contenders, turn, wrong)
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    comm.Allreduce(MPI.IN_PLACE, wrong, MPI.SUM)
    return [Measured(one.what, **summary(times[:, i]), wrong=int(wrong[i])) for i, one in enumerate(contenders)]


def iterations_for(seconds: float, round_s: float) -> int:
    """Return how many rounds of all contenders fit into `seconds`, within bounds."""
    return int(min(MAX_ITERATIONS, max(MIN_ITERATIONS, seconds / max(round_s, 1e-9))))


def summary(times_s: Any) -> dict[str, Any]:
    """Return how many times there are, their median, 95th percentile, least and greatest. times_s: (n,), n > 0."""
    median_s, p95_s = np.percentile(times_s, (50, 95))
    found = {"median_s": median_s, "p95_s": p95_s, "min_s": np.min(times_s), "max_s": np.max(times_s)}
    return {"iterations": len(times_s), **{name: float(value) for name, value in found.items()}}


def _round(
    comm: MPI.Intracomm,
    contenders: Sequence[Contender],
    turn: int,
    wrong: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> list[float]:
    times = [0.0] * len(contenders)
    order = list(range(len(contenders)))
    random.Random(turn).shuffle(order)
    for i in order:
        contender = contenders[i]
        contender.prepare()
        comm.Barrier()
        start_s = time.perf_counter()
        contender.run()
        times[i] = time.perf_counter() - start_s
        wrong[i] += not contender.check()
    return times
