"""Rows, the table that rank 0 prints of them, and the JSON file that it writes.

A row is a dict of plain values, as JSON has it: times in seconds, bandwidths in GB/s, None for what is not known.

Columns of the table of sums: size of the value; who; median and 95th percentile of the slowest rank's time; the two
bandwidths of nccl-tests; median divided by raw MPI's of the same interleaved run; messages in one call of the rank that
sends most, how many of them negotiate instead of carrying values, bytes sent, bytes copied; bytes that the store holds
beyond the user's arrays. "-": not known.

    algbw = S / t                     bytes of the value per second, in GB/s of 10^9
    busbw = algbw * 2 (n - 1) / n     what one rank's links carry in an allreduce by any bandwidth-optimal algorithm

Source: NVIDIA nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpikv.commands.bench.measure import Measured
from mpikv.commands.numbers import short
from mpikv.commands.tables import Column, Row, Table
from mpikv.common.files import replacing

RAW = "raw MPI"
GIGA = 1e9
FORMAT = 1  # of the JSON file; another number when a field changes its meaning
COUNTS = ("messages", "bytes_sent", "control_messages", "bytes_copied", "held_bytes", "shared_bytes")

Text = Callable[[Row], object]


def known(name: str, form: Callable[[Any], str] = str) -> Text:
    return lambda row: "-" if row[name] is None else form(row[name])


def milliseconds(name: str) -> Text:
    return lambda row: f"{row[name] * 1e3:.2f}"


def _microseconds(name: str) -> Text:
    return lambda row: f"{row[name] * 1e6:.{1 if row[name] < 0.01 else 0}f}"


def _rate(name: str) -> Text:
    return lambda row: f"{row[name]:.{3 if row[name] < 10 else 2}f}"


def _count(number: int) -> str:
    return str(number) if number < 10_000 else short(number)


SUMS = Table(
    Column("bytes", 9, text=lambda row: short(row["n_bytes"])),
    Column("what", 20, left=True, text=lambda row: row["what"]),
    Column("median us", 10, text=_microseconds("median_s")),
    Column("p95 us", 10, text=_microseconds("p95_s")),
    Column("algbw", 7, text=_rate("algbw")),
    Column("busbw", 7, text=_rate("busbw")),
    Column("vs raw", 7, text=known("ratio_to_raw", "{:.2f}".format)),
    Column("msgs", 6, text=known("messages", _count)),
    Column("ctrl", 5, text=known("control_messages", _count)),
    Column("sent", 10, text=known("bytes_sent", _count)),
    Column("copied", 10, text=known("bytes_copied", _count)),
    Column("held", 10, text=known("held_bytes", _count)),
)


def sums(
    results: Sequence[Measured],
    counts: Mapping[str, Mapping[str, int | None]],
    *,
    n_bytes: int,
    arrays: int,
    ranks: int,
) -> list[dict[str, Any]]:
    """Return the rows of one size. ranks: that hold a copy of the value. counts: by contender.

    `ratio_to_raw` divides by the median of the contender `RAW`; it is None where there is none.
    """
    raw_s = next((result.median_s for result in results if result.what == RAW), None)
    rows = []
    for result in results:
        algbw = n_bytes / result.median_s / GIGA
        rows.append(
            {
                "n_bytes": n_bytes,
                "arrays": arrays,
                **result._asdict(),
                "algbw": algbw,
                "busbw": algbw * 2 * (ranks - 1) / ranks,
                "ratio_to_raw": None if raw_s is None else result.median_s / raw_s,
                **{name: counts.get(result.what, {}).get(name) for name in COUNTS},
            }
        )
    return rows


def write_json(path: str, content: Mapping[str, Any]) -> None:
    text = json.dumps({"format": FORMAT, **content}, indent=1, allow_nan=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode())
