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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpikv.commands.bench.counts import Counts
from mpikv.commands.bench.statistics import Summary, summarise

if TYPE_CHECKING:
    from mpi4py import MPI

MIN_ITERATIONS = 5
MAX_ITERATIONS = 2000
DEFAULT_WARMUP = 3


def _nothing() -> None:
    pass


def _fine() -> bool:
    return True


@dataclass
class Contender:
    """One way of doing the work. `run` alone is timed; all four are collective.

    prepare: fill the arrays. check: whether the result is exact. close: give everything back.
    counts: what one run in the steady state sends and copies; None where it cannot be counted.
    """

    what: str
    prepare: Callable[[], None]
    run: Callable[[], None]
    check: Callable[[], bool] = _fine
    close: Callable[[], None] = _nothing
    counts: Callable[[], Counts] = Counts


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    iterations: None adapts to `seconds` a size, all contenders, fills and checks together.
    """

    iterations: int | None = None
    warmup: int = DEFAULT_WARMUP
    seconds: float = 0.5
    check: bool = True


@dataclass(frozen=True)
class Result:
    """What became of one contender. wrong: results that were not exact, over all ranks and iterations."""

    what: str
    summary: Summary
    wrong: int


def measure(comm: MPI.Intracomm, contenders: Sequence[Contender], plan: Plan) -> list[Result]:
    """Run all contenders, warm-up first. comm: the ranks that take part, the benchmark's own. Collective."""
    wrong = np.zeros(len(contenders), np.int64)
    round_s = 0.0
    for turn in range(max(1, plan.warmup)):
        start_s = time.perf_counter()
        _round(comm, contenders, turn, plan, wrong)
        round_s = time.perf_counter() - start_s
    iterations = plan.iterations or comm.bcast(iterations_for(plan.seconds, round_s))
    times = np.empty((iterations, len(contenders)))
    gc.collect()
    for turn in range(iterations):
        times[turn] = _round(comm, contenders, turn, plan, wrong)
    return _slowest(comm, contenders, times, wrong)


def iterations_for(seconds: float, round_s: float) -> int:
    """Return how many rounds of all contenders fit into `seconds`, within bounds."""
    return int(min(MAX_ITERATIONS, max(MIN_ITERATIONS, seconds / max(round_s, 1e-9))))


def _round(
    comm: MPI.Intracomm,
    contenders: Sequence[Contender],
    turn: int,
    plan: Plan,
    wrong: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> list[float]:
    """Run each contender once, and return this rank's times."""
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
        if plan.check and not contender.check():
            wrong[i] += 1
    return times


def _slowest(
    comm: MPI.Intracomm,
    contenders: Sequence[Contender],
    times: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    wrong: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> list[Result]:
    from mpi4py import MPI  # noqa: PLC0415

    slowest, wrongs = np.empty_like(times), np.empty_like(wrong)
    comm.Allreduce(times, slowest, MPI.MAX)
    comm.Allreduce(wrong, wrongs, MPI.SUM)
    return [Result(contender.what, summarise(slowest[:, i]), int(wrongs[i])) for i, contender in enumerate(contenders)]
