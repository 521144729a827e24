"""One row per size and contender, and the table that rank 0 prints.

The table's columns: size of the value; who; median and 95th percentile of the slowest rank's time; the two bandwidths
of nccl-tests; median divided by raw MPI's of the same interleaved run; messages in one call of the rank that sends
most, how many of them negotiate instead of carrying values, bytes sent, bytes copied; what bounds the call, and how
much of that bound is reached (100: nothing is faster). "-": not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpikv.commands.bench.counts import Counts
from mpikv.commands.bench.limits import Limit, Rates
from mpikv.commands.bench.measure import Result
from mpikv.commands.bench.raw import RAW
from mpikv.commands.bench.sizes import short
from mpikv.commands.bench.statistics import algbw, busbw
from mpikv.commands.tables import Column, Table


@dataclass(frozen=True)
class Row:
    """One contender at one size. Times in seconds, bandwidths in GB/s; None: not known."""

    n_bytes: int
    arrays: int
    what: str
    iterations: int
    median_s: float
    p95_s: float
    min_s: float
    max_s: float
    algbw: float
    busbw: float
    ratio_to_raw: float | None
    messages: int | None
    bytes_sent: int | None
    control_messages: int | None
    bytes_copied: int | None
    held_bytes: int | None
    shared_bytes: int | None
    limit_s: float
    limit_by: str
    limit_percent: float
    add_bytes_per_s: float | None
    copy_bytes_per_s: float | None
    together_bytes_per_s: float | None
    latency_s: float
    link_bytes_per_s: float | None
    wrong: int


def rows_of(
    results: Sequence[Result],
    *,
    n_bytes: int,
    arrays: int,
    ranks: int,
    counts: Mapping[str, Counts],
    rates: Rates,
    limits: Mapping[str, Limit],
    limit: Limit,
) -> list[Row]:
    """Return the rows of one size. ranks: that hold a copy of the value.

    limits: of contenders with another than `limit`. `ratio_to_raw` divides by the median of the contender `RAW`; it is
    None where there is none.
    """
    raw_s = next((result.summary.median_s for result in results if result.what == RAW), None)
    rows = []
    for result in results:
        times, bound = result.summary, limits.get(result.what, limit)
        rows.append(
            Row(
                n_bytes=n_bytes,
                arrays=arrays,
                what=result.what,
                iterations=times.iterations,
                median_s=times.median_s,
                p95_s=times.p95_s,
                min_s=times.min_s,
                max_s=times.max_s,
                algbw=algbw(n_bytes, times.median_s),
                busbw=busbw(n_bytes, times.median_s, ranks),
                ratio_to_raw=None if raw_s is None else times.median_s / raw_s,
                **counts.get(result.what, Counts())._asdict(),
                limit_s=bound.time_s,
                limit_by=bound.by,
                limit_percent=100 * bound.time_s / times.median_s,
                add_bytes_per_s=_finite(rates.add_bytes_per_s),
                copy_bytes_per_s=_finite(rates.copy_bytes_per_s),
                together_bytes_per_s=_finite(rates.together_bytes_per_s),
                latency_s=rates.latency_s,
                link_bytes_per_s=rates.link_bytes_per_s,
                wrong=result.wrong,
            )
        )
    return rows


def _finite(rate: float) -> float | None:
    return rate if rate != float("inf") else None  # JSON has no infinity


TABLE = Table(
    Column("bytes", 9),
    Column("what", 20, left=True),
    Column("median us", 10),
    Column("p95 us", 10),
    Column("algbw", 7),
    Column("busbw", 7),
    Column("vs raw", 7),
    Column("msgs", 6),
    Column("ctrl", 5),
    Column("sent", 10),
    Column("copied", 10),
    Column("limit", 8),
    Column("% of it", 7),
)


def table_row(row: Row) -> str:
    """Return one line; a wrong result says so at its end."""
    return TABLE.line(
        short(row.n_bytes),
        row.what,
        microseconds(row.median_s),
        microseconds(row.p95_s),
        _number(row.algbw),
        _number(row.busbw),
        "-" if row.ratio_to_raw is None else f"{row.ratio_to_raw:.2f}",
        _count(row.messages),
        _count(row.control_messages),
        _count(row.bytes_sent),
        _count(row.bytes_copied),
        row.limit_by,
        f"{row.limit_percent:.0f}",
        end=f"  WRONG in {row.wrong} results" if row.wrong else "",
    )


def microseconds(time_s: float) -> str:
    """Write a time in microseconds, with four digits or more."""
    time_us = time_s * 1e6
    return f"{time_us:.1f}" if time_us < 10_000 else f"{time_us:.0f}"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number) if number < 10_000 else short(number)
