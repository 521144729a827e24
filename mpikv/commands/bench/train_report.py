"""One row per batch size and way of `mpikv bench train`, and the table that rank 0 prints.

Columns: examples of one rank in a step; who; median and 95th percentile of the slowest rank's time for a step, in
milliseconds; the median and the 95th percentile of its ratio to the step alone in the same round; how far the weights
were from the reference's at most, relative to how far they have moved.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpikv.commands.tables import Column, Table


@dataclass(frozen=True)
class TrainRow:
    """One way with one batch size.

    Times in seconds, of one step. n_bytes: of all gradients. iterations: rounds. difference: None where it is no
    number.
    """

    model: str
    batch: int
    what: str
    n_bytes: int
    iterations: int
    steps: int
    median_s: float
    p95_s: float
    min_s: float
    max_s: float
    ratio_to_alone: float
    ratio_p95: float
    difference: float | None
    wrong: int


TABLE = Table(
    Column("batch", 6),
    Column("what", 22, left=True),
    Column("median ms", 10),
    Column("p95 ms", 10),
    Column("vs alone", 9),
    Column("p95", 7),
    Column("rounds", 7),
    Column("differs", 9),
)


def line(row: TrainRow) -> str:
    """Return a row of the table; a wrong result says so at its end."""
    return TABLE.line(
        row.batch,
        row.what,
        f"{row.median_s * 1e3:.2f}",
        f"{row.p95_s * 1e3:.2f}",
        f"{row.ratio_to_alone:.3f}",
        f"{row.ratio_p95:.3f}",
        row.iterations,
        "-" if row.difference is None else f"{row.difference:.1e}",
        end=f"  WRONG in {row.wrong} rounds" if row.wrong else "",
    )
