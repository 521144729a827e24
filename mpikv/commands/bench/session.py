"""One run of the benchmark: options, ranks, and what was found, printed as it comes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

import mpikv.arrays.as_numpy  # noqa: F401 - gives NumPy the dtype bfloat16
from mpikv.commands.bench import plot
from mpikv.commands.bench.counts import Counts
from mpikv.commands.bench.job import Job
from mpikv.commands.bench.limits import Limit, Rates, allreduce_limit
from mpikv.commands.bench.measure import Contender, Plan, measure
from mpikv.commands.bench.probes import Probes
from mpikv.commands.bench.raw import RAW
from mpikv.commands.bench.report import Row, rows_of, table_row
from mpikv.commands.bench.sizes import short
from mpikv.commands.tables import Table
from mpikv.common.progress import Progress

T = TypeVar("T")


@dataclass
class Session:
    """What the commands share. rows, notes and tables are complete on every rank; rank 0 alone prints."""

    options: argparse.Namespace
    job: Job
    progress: Progress
    link_bytes_per_s: float | None = None  # the slowest link between hosts; None on one host
    rows: list[Any] = field(default_factory=list)  # Row, or a kind's own a dataclass with `what` and `wrong`
    notes: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # what a command adds to the JSON file
    draw: Callable[[str, str, Sequence[Any]], None] = plot.bandwidths  # for --plot: path, title, rows

    def probes(self, n_bytes: int, over: Job | None = None) -> Probes:
        """Make the probes for values of `n_bytes`; `over` as in `Probes`. Collective."""
        return Probes(self.job, n_bytes, self.dtype, self.link_bytes_per_s, over)

    @property
    def plan(self) -> Plan:
        """How long to measure."""
        options = self.options
        return Plan(options.iterations, options.warmup, options.seconds, options.check)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of all arrays."""
        found: np.dtype[np.generic] = np.dtype(self.options.dtype)
        return found

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)
            self.progress.say(f"# {text}")

    def titles(self, table: Table) -> None:
        """Print the titles of a table's columns on rank 0, which lays out tables."""
        if self.job.rank == 0:
            self.progress.say(table.head())

    def lines(self, line: Callable[[T], str], rows: Sequence[T]) -> None:
        """Print one line of a table for each row, on rank 0."""
        if self.job.rank == 0:
            self.progress.say(*map(line, rows))

    def compare(
        self,
        n_bytes: int,
        arrays: int,
        contenders: Sequence[Contender],
        probes: Probes,
        limits: Callable[[Rates], Mapping[str, Limit]] | None = None,
        *,
        show_raw: bool = True,
    ) -> list[Row]:
        """Measure, count, close and print the contenders of one size. Collective over the job.

        limits: from the rates, the limits of contenders that are not bound as an allreduce over the job is. show_raw:
        without it the row of raw MPI serves as the baseline only.
        """
        job = self.job
        self.progress.update(what=short(n_bytes))
        everyone = measure(job.comm, [*contenders, *probes.contenders()], self.plan)
        results = everyone[: len(contenders)]
        rates = probes.rates({result.what: result for result in everyone})
        counts: dict[str, Counts] = {contender.what: contender.counts() for contender in contenders}
        for contender in contenders:
            contender.close()
        physical = allreduce_limit(n_bytes, job.size, job.ranks_per_host, len(job.host_names), rates)
        rows = rows_of(
            results,
            n_bytes=n_bytes,
            arrays=arrays,
            ranks=job.size,
            counts=counts,
            rates=rates,
            limits=limits(rates) if limits else {},
            limit=physical,
        )
        rows = [row for row in rows if show_raw or row.what != RAW]
        self.rows += rows
        self.lines(table_row, rows)
        self.progress.update(1)
        return rows
