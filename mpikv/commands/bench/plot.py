"""The picture of `--plot`, drawn by matplotlib: bandwidth over size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mpikv.commands.bench.report import GIGA, Row
from mpikv.common.files import replacing
from mpikv.errors import ConfigError

TICKS = 9  # labels such as "256 KiB" that stand side by side under a picture


def check_matplotlib() -> None:
    """Raise ConfigError where matplotlib is missing; it says how to get it."""
    try:
        import matplotlib  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def bandwidths(path: str, title: str, rows: Sequence[Row]) -> Any:
    """Draw bandwidth (algbw) over size, one line per contender, the limit dashed. Returns matplotlib's figure.

    rows: of `report.sums`. A point may lie above the limit, which is worked out from rates measured beside it: caches
    may serve a call better than they served the measurement (limits.py).
    """
    from matplotlib import ticker  # noqa: PLC0415 - an extra
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - no window
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 5.5))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for what in dict.fromkeys(row["what"] for row in rows):
        points = [(row["n_bytes"], row["algbw"]) for row in rows if row["what"] == what]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=what)
    limits = {row["n_bytes"]: row["n_bytes"] / row["limit_s"] / GIGA for row in rows if row["limit_s"] > 0}
    axes.plot(list(limits), list(limits.values()), "k--", label="limit, estimated (caches may beat it)")
    axes.set(title=title, xlabel="size of the value", ylabel="algbw: size of the value / time of a call")
    axes.set(xscale="log", yscale="log")
    sizes = [row["n_bytes"] for row in rows]
    axes.set_xticks(size_ticks(min(sizes), max(sizes)))
    axes.xaxis.set_major_formatter(lambda n_bytes, _place: size_label(n_bytes))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    lowest, highest = axes.get_ylim()
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if highest < 1000 * lowest else (1,)))
    engineers = ticker.EngFormatter("B/s")
    axes.yaxis.set_major_formatter(lambda rate, _place: engineers(rate * GIGA))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    with replacing(path) as file:
        figure.savefig(file, dpi=120, format=os.path.splitext(path)[1][1:] or None)
    return figure


def size_label(n_bytes: float) -> str:
    """Write a size as `512 B`, `4 KiB`, `1.5 MiB`: in the largest unit that it fills."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n_bytes >= 1 << power:
            return f"{n_bytes / (1 << power):g} {unit}"
    return f"{n_bytes:g} B"


def size_ticks(min_bytes: int, max_bytes: int) -> list[int]:
    """Return powers of two around the sizes, evenly spaced, about `TICKS` of them."""
    first, last = min_bytes.bit_length() - 1, (max_bytes - 1).bit_length()
    step = max(1, -(-(last - first) // TICKS))
    return [1 << power for power in range(first, last + step, step)]
