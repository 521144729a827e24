"""Raw MPI: MPI_Allreduce in place through mpi4py, on the benchmark's own communicator.

Two ways of summing a list of arrays: one call per array; or one call for all of them, packed into one buffer before and
unpacked after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.report import RAW

PACKED = f"{RAW}, packed"


def mpi_can_add(dtype: np.dtype[np.generic]) -> bool:
    """Return whether every MPI library has a sum for this dtype, one of `options.DTYPES`."""
    return dtype.name in ("float32", "float64", "int32", "int64")


def sums_in_place(what: str, pattern: Pattern, arrays: Sequence[HostArray], run: Callable[[], object]) -> Contender:
    """Make a contender that sums these arrays in place: they are filled before, and compared with the sum after it."""

    def prepare() -> None:
        for array in arrays:
            pattern.fill(array)

    return Contender(what, run, prepare, lambda: all(pattern.is_total(array) for array in arrays))


def raw_contender(job: BenchJob, pattern: Pattern, arrays: Sequence[HostArray]) -> Contender:
    """Make the contender that calls MPI_Allreduce in place, once per array."""
    from mpi4py import MPI  # noqa: PLC0415

    allreduce, op = job.comm.Allreduce, MPI.SUM
    in_place: Any = MPI.IN_PLACE

    def run() -> None:
        for array in arrays:
            allreduce(in_place, array, op)

    return sums_in_place(RAW, pattern, arrays, run)


def packed_contender(job: BenchJob, pattern: Pattern, arrays: Sequence[HostArray]) -> Contender:
    """Make the contender that copies into one buffer, calls MPI_Allreduce once, and copies back."""
    from mpi4py import MPI  # noqa: PLC0415

    flat = [array.reshape(-1) for array in arrays]
    buffer = np.empty(sum(array.size for array in flat), flat[0].dtype)
    within = np.split(buffer, np.cumsum([array.size for array in flat])[:-1])

    def run() -> None:
        for copy, array in zip(within, flat, strict=True):
            copy[...] = array
        job.comm.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
        for copy, array in zip(within, flat, strict=True):
            array[...] = copy

    return sums_in_place(PACKED, pattern, arrays, run)
