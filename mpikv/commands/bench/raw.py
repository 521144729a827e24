"""Raw MPI: MPI_Allreduce in place through mpi4py, on the benchmark's own communicator.

Three ways of summing a list of arrays: one call per array; or one call for all of them, packed into one buffer before
and unpacked after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench.job import Job
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import Pattern, Values

RAW = "raw MPI"
PACKED = "raw MPI, packed"


def raw_contender(job: Job, pattern: Pattern, arrays: Sequence[HostArray], what: str = RAW) -> Contender:
    """Make the contender that calls MPI_Allreduce in place, once per array."""
    from mpi4py import MPI  # noqa: PLC0415

    allreduce, op = job.comm.Allreduce, MPI.SUM
    in_place: Any = MPI.IN_PLACE

    def run() -> None:
        for array in arrays:
            allreduce(in_place, array, op)

    return Contender(what, filler(pattern, arrays), run, checker(pattern, arrays))


def packed_contender(job: Job, pattern: Pattern, arrays: Sequence[HostArray]) -> Contender:
    """Make the contender that copies into one buffer, calls MPI_Allreduce once, and copies back."""
    from mpi4py import MPI  # noqa: PLC0415

    flat = [array.reshape(-1) for array in arrays]
    buffer = np.empty(sum(array.size for array in flat), flat[0].dtype)
    ends = np.cumsum([array.size for array in flat])
    parts = [buffer[end - array.size : end] for array, end in zip(flat, ends, strict=True)]

    def run() -> None:
        for part, array in zip(parts, flat, strict=True):
            part[...] = array
        job.comm.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
        for part, array in zip(parts, flat, strict=True):
            array[...] = part

    return Contender(PACKED, filler(pattern, arrays), run, checker(pattern, arrays))


def filler(pattern: Values, arrays: Sequence[Any]) -> Any:
    """Make a `prepare` that fills all arrays."""

    def prepare() -> None:
        for array in arrays:
            pattern.fill(array)
        pattern.finish()

    return prepare


def checker(pattern: Values, arrays: Sequence[Any]) -> Any:
    """Make a `check` that all arrays hold the sum."""

    def check() -> bool:
        return all(pattern.is_total(array) for array in arrays)

    return check
