"""The picture of `--plot`, drawn by matplotlib: bandwidth over size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mpikv.commands.bench.report import GIGA
from mpikv.commands.numbers import short
from mpikv.commands.tables import Row
from mpikv.common.files import replacing
from mpikv.errors import ConfigError


def check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def bandwidths(path: str, title: str, rows: Sequence[Row]) -> Any:
    """Draw bandwidth (algbw) over size, one line per contender. Returns matplotlib's figure. rows: of `report.sums`."""
    from matplotlib import ticker  # noqa: PLC0415 - an extra
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - no window
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 5.5))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for what in dict.fromkeys(row["what"] for row in rows):
        points = [(row["n_bytes"], row["algbw"] * GIGA) for row in rows if row["what"] == what]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=what)
    axes.set(title=title, xlabel="bytes of the value", ylabel="algbw: size of the value / time of a call")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda n_bytes, _place: short(int(n_bytes)))
    axes.yaxis.set_major_formatter(ticker.EngFormatter("B/s"))
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    with replacing(path) as file:
        figure.savefig(file, dpi=120, format=os.path.splitext(path)[1][1:] or None)
    return figure
