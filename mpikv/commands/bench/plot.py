"""The pictures of `--plot`, drawn by matplotlib: bandwidth over size, and the time of a step relative to another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from mpikv.commands.bench.statistics import algbw
from mpikv.errors import ConfigError

TICKS = 9  # labels such as "256 KiB" that stand side by side under a picture


def check_matplotlib() -> None:
    """Raise ConfigError where matplotlib is missing; it says how to get it."""
    try:
        import matplotlib  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


@contextlib.contextmanager
def _axes(path: str, **labels: str) -> Iterator[Any]:
    """Empty axes, which are written to `path` at the end of the block. labels: title, xlabel, ylabel."""
    import matplotlib  # noqa: PLC0415 - an extra

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    axes.set(**labels)
    yield axes
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def bandwidths(path: str, title: str, rows: Sequence[Any]) -> None:
    """Draw bandwidth (algbw) over size, one line per contender, the limit dashed. rows: `report.Row`.

    A point may lie above the limit, which is worked out from rates measured beside it: caches may serve a call
    better than they served the measurement (limits.py).
    """
    with _axes(
        path, title=title, xlabel="size of the value", ylabel="algbw: size of the value / time of a call"
    ) as axes:
        from matplotlib import ticker  # noqa: PLC0415

        for what in dict.fromkeys(row.what for row in rows):
            line = [row for row in rows if row.what == what]
            axes.plot([row.n_bytes for row in line], [row.algbw for row in line], marker="o", markersize=3, label=what)
        limits = {row.n_bytes: algbw(row.n_bytes, row.limit_s) for row in rows if row.limit_s > 0}
        axes.plot(list(limits), list(limits.values()), "k--", label="limit, estimated (caches may beat it)")
        axes.set(xscale="log", yscale="log")
        sizes = [row.n_bytes for row in rows]
        axes.set_xticks(size_ticks(min(sizes), max(sizes)))
        axes.xaxis.set_major_formatter(lambda n_bytes, _place: size_label(n_bytes))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        lowest, highest = axes.get_ylim()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if highest < 1000 * lowest else (1,)))
        axes.yaxis.set_major_formatter(lambda rate, _place: rate_label(rate))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
        axes.grid(visible=True, which="major", alpha=0.3)


def step_times(path: str, title: str, rows: Sequence[Any]) -> None:
    """Draw the ratio to the step alone, a group of bars for each batch size. rows: `train_report.TrainRow`."""
    ways, sizes = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("what", "batch"))
    width = 1 / (len(ways) + 1)
    with _axes(path, title=title, xlabel="batch", ylabel="time of a step, relative to the step alone") as axes:
        for i, what in enumerate(ways):
            heights = [row.ratio_to_alone for row in rows if row.what == what]
            axes.bar([size + (i - len(ways) / 2) * width for size in range(len(sizes))], heights, width, label=what)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])


def size_label(n_bytes: float) -> str:
    """Write a size as `512 B`, `4 KiB`, `1.5 MiB`: in the largest unit that it fills."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n_bytes >= 1 << power:
            return f"{n_bytes / (1 << power):g} {unit}"
    return f"{n_bytes:g} B"


def rate_label(rate: float) -> str:
    """Write a rate in GB/s of 10^9 as `2 GB/s`, `50 MB/s`, `1 kB/s`."""
    for factor, unit in ((1, "GB/s"), (1e3, "MB/s"), (1e6, "kB/s")):
        if rate * factor >= 0.9999999:  # 1 that was worked out from a logarithm
            return f"{rate * factor:g} {unit}"
    return f"{rate * 1e9:g} B/s"


def size_ticks(min_bytes: int, max_bytes: int) -> list[int]:
    """Return powers of two around the sizes, evenly spaced, about `TICKS` of them."""
    first, last = min_bytes.bit_length() - 1, (max_bytes - 1).bit_length()
    step = max(1, -(-(last - first) // TICKS))
    return [1 << power for power in range(first, last + step, step)]
