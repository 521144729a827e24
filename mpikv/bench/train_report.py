"""One row per batch size and way of `mpikv bench train`, the table that rank 0 prints, and a picture of it.

Columns: examples of one rank in a step; who; median and 95th percentile of the slowest rank's time for a step, in
milliseconds; the median and the 95th percentile of its ratio to the step alone in the same round; how far the weights
were from the reference's at most, relative to how far they have moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainRow:
    """One way with one batch size. Times in seconds, of one step. n_bytes: of all gradients. iterations: rounds.

    difference: None where it is no number.
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

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def header() -> str:
    """The titles of the columns."""
    titles = f"{'median ms':>10} {'p95 ms':>10} {'vs alone':>9} {'p95':>7} {'rounds':>7} {'differs':>9}"
    return f"{'batch':>6} {'what':<22} {titles}"


def line(row: TrainRow) -> str:
    """A row of the table; a wrong result says so at its end."""
    times = f"{row.median_s * 1e3:>10.2f} {row.p95_s * 1e3:>10.2f} {row.ratio_to_alone:>9.3f} {row.ratio_p95:>7.3f}"
    differs = "-" if row.difference is None else f"{row.difference:.1e}"
    wrong = f"  WRONG in {row.wrong} rounds" if row.wrong else ""
    return f"{row.batch:>6} {row.what:<22} {times} {row.iterations:>7} {differs:>9}{wrong}"


def write_plot(path: str, title: str, rows: Sequence[Any]) -> None:
    """The ratio to the step alone, a group of bars for each batch size."""
    import matplotlib  # noqa: PLC0415 - an extra

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot  # noqa: PLC0415

    ways, sizes = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("what", "batch"))
    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    for i, what in enumerate(ways):
        heights = [row.ratio_to_alone for row in rows if row.what == what]
        axes.bar(
            [size + (i - len(ways) / 2) / (len(ways) + 1) for size in range(len(sizes))],
            heights,
            1 / (len(ways) + 1),
            label=what,
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel="batch", ylabel="time of a step, relative to the step alone", title=title)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
