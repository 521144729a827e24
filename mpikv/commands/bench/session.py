"""One run of the benchmark: options, ranks, and what was found, printed as it comes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mpikv.arrays.as_numpy  # noqa: F401 - gives NumPy the dtype bfloat16
from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.measure import Contender, measure
from mpikv.commands.bench.report import RAW, SUMS, sums
from mpikv.commands.numbers import short
from mpikv.commands.tables import Row, Table
from mpikv.common.progress import Progress

FACTOR = 4  # from size to size


def sweep(min_bytes: int, max_bytes: int, itemsize_bytes: int = 1) -> list[int]:
    """The sizes from `min_bytes` to `max_bytes`, each `FACTOR` times the last, rounded up to whole items.

    Raises ValueError where nothing is left to measure.
    """
    if min_bytes > max_bytes:
        raise ValueError(f"the smallest size, {short(min_bytes)}, is larger than the largest, {short(max_bytes)}")
    sizes = []
    while min_bytes <= max_bytes:
        sizes.append(-(-min_bytes // itemsize_bytes) * itemsize_bytes)
        min_bytes *= FACTOR
    return list(dict.fromkeys(sizes))


@dataclass
class BenchRun:
    """What the benchmarks share. rows and notes are complete on every rank; rank 0 alone prints."""

    options: argparse.Namespace
    job: BenchJob
    progress: Progress
    rows: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        found: np.dtype[np.generic] = np.dtype(self.options.dtype)
        return found

    @property
    def sizes(self) -> list[int]:
        return sweep(self.options.min_bytes, self.options.max_bytes, self.dtype.itemsize)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.progress.say(f"# {text}")

    def titles(self, table: Table) -> None:
        """Print the titles of a table's columns on rank 0, which lays out tables."""
        if self.job.rank == 0:
            self.progress.say(table.head())

    def add(self, table: Table, rows: Sequence[Row]) -> None:
        self.rows += rows
        if self.job.rank == 0:
            for row in rows:
                wrong = row.get("wrong")
                self.progress.say(table.of(row, f"  WRONG in {wrong} results" if wrong else ""))
        self.progress.update(1)

    def compare(self, n_bytes: int, arrays: int, contenders: Sequence[Contender], *, show_raw: bool = True) -> None:
        """Measure, count, close and print the contenders of one size. Collective over the job.

        show_raw: without it the row of raw MPI serves as the baseline only.
        """
        self.progress.update(what=short(n_bytes))
        options = self.options
        results = measure(self.job.comm, contenders, seconds=options.seconds, iterations=options.iterations)
        counts = {contender.what: contender.counts() for contender in contenders}
        for contender in contenders:
            contender.close()
        rows = sums(results, counts, n_bytes=n_bytes, arrays=arrays, ranks=self.job.size)
        self.add(SUMS, [row for row in rows if show_raw or row["what"] != RAW])
