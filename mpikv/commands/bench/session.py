"""One run of the benchmark: options, ranks, and what was found, printed as it comes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mpikv.arrays.as_numpy  # noqa: F401 - gives NumPy the dtype bfloat16
from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.limits import Limit, Rates, allreduce_limit
from mpikv.commands.bench.link import MeasuredLink
from mpikv.commands.bench.measure import Contender, Measured, measure
from mpikv.commands.bench.probes import Probes
from mpikv.commands.bench.report import RAW, SUMS, BenchTable, Row, sums
from mpikv.commands.bench.sizes import short, sweep
from mpikv.common.progress import Progress

Limits = Callable[[str, Rates], Limit | None]
"""Of a contender, from the rates; None where it is bound as an allreduce over the job is."""


def _as_allreduce(_what: str, _rates: Rates) -> None:
    return None


@dataclass
class BenchRun:
    """What the benchmarks share. rows and notes are complete on every rank; rank 0 alone prints.

    links: as `link.measured` finds them, over all ranks. more: what a benchmark adds to the JSON file.
    """

    options: argparse.Namespace
    job: BenchJob
    progress: Progress
    links: Sequence[MeasuredLink]
    rows: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of all arrays."""
        found: np.dtype[np.generic] = np.dtype(self.options.dtype)
        return found

    @property
    def sizes(self) -> list[int]:
        """The sizes of the sweep, in bytes."""
        options = self.options
        return sweep(options.min_bytes, options.max_bytes, options.factor, self.dtype.itemsize)

    @property
    def latency_s(self) -> float:
        """Of the link that takes longest, when the job began."""
        return max((one.latency_s for one in self.links), default=0.0)

    @property
    def link_bytes_per_s(self) -> float | None:
        """Of the slowest link between hosts; None on one host."""
        return min((one.bytes_per_s for one in self.links if one.which == "other host"), default=None)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)
            self.progress.say(f"# {text}")

    def titles(self, table: BenchTable) -> None:
        """Print the titles of a table's columns on rank 0, which lays out tables."""
        if self.job.rank == 0:
            self.progress.say(table.head())

    def add(self, table: BenchTable, rows: Sequence[Row]) -> None:
        """Keep some rows, and print them on rank 0."""
        self.rows += rows
        if self.job.rank == 0:
            self.progress.say(*map(table.line, rows))
        self.progress.update(1)

    def measure(self, contenders: Sequence[Contender]) -> list[Measured]:
        """Measure contenders side by side for as long as the options say. Collective over the job."""
        return measure(self.job.comm, contenders, seconds=self.options.seconds, iterations=self.options.iterations)

    def compare(
        self,
        n_bytes: int,
        arrays: int,
        contenders: Sequence[Contender],
        limits: Limits = _as_allreduce,
        *,
        show_raw: bool = True,
    ) -> None:
        """Measure, count, close and print the contenders of one size. Collective over the job.

        show_raw: without it the row of raw MPI serves as the baseline only.
        """
        job = self.job
        self.progress.update(what=short(n_bytes))
        probes = Probes(job, n_bytes, self.dtype)
        everyone = self.measure([*contenders, *probes.contenders()])
        medians_s = {result.what: result.median_s for result in everyone}
        rates = probes.rates(medians_s, self.link_bytes_per_s)
        counts = {contender.what: contender.counts() for contender in contenders}
        for contender in contenders:
            contender.close()
        physical = allreduce_limit(n_bytes, job.size, job.ranks_per_host, len(job.host_names), rates)
        rows = sums(
            everyone[: len(contenders)],
            counts,
            rates,
            lambda what: limits(what, rates) or physical,
            n_bytes=n_bytes,
            arrays=arrays,
            ranks=job.size,
        )
        self.add(SUMS, [row for row in rows if show_raw or row["what"] != RAW])
