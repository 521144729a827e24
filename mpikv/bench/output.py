"""What rank 0 leaves behind: a JSON file, and a picture of bandwidth over size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpikv.bench.report import Row
from mpikv.bench.statistics import algbw
from mpikv.errors import ConfigError

TICKS = 9  # labels such as "256 KiB" that stand side by side under a picture
FORMAT = 1  # of the JSON file; another number when a field changes its meaning


def document(
    command: str, found: Mapping[str, Any], rows: Sequence[Row], notes: Sequence[str], **more: Any
) -> dict[str, Any]:
    """Everything of one run."""
    return {
        "format": FORMAT,
        "command": command,
        **found,
        "rows": [row.as_dict() for row in rows],
        "notes": list(notes),
        **more,
    }


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """OSError where the file cannot be written."""
    Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def check_writable(option: str, path: str) -> None:
    """Raise ConfigError before an hour of measuring, not after it."""
    folder = Path(path).resolve().parent
    if Path(path).is_dir():
        raise ConfigError(f"{option} {path}: it is a folder")
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}")


def check_matplotlib() -> None:
    """Raise ConfigError that says how to get it."""
    try:
        import matplotlib  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def size_label(n_bytes: float) -> str:
    """`512 B`, `4 KiB`, `1.5 MiB`: in the largest unit that it fills."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n_bytes >= 1 << power:
            return f"{n_bytes / (1 << power):g} {unit}"
    return f"{n_bytes:g} B"


def rate_label(rate: float) -> str:
    """A rate in GB/s of 10^9 as `2 GB/s`, `50 MB/s`, `1 kB/s`."""
    for factor, unit in ((1, "GB/s"), (1e3, "MB/s"), (1e6, "kB/s")):
        if rate * factor >= 0.9999999:  # 1 that was worked out from a logarithm
            return f"{rate * factor:g} {unit}"
    return f"{rate * 1e9:g} B/s"


def size_ticks(min_bytes: int, max_bytes: int) -> list[int]:
    """Powers of two around the sizes, evenly spaced, about `TICKS` of them."""
    first, last = min_bytes.bit_length() - 1, (max_bytes - 1).bit_length()
    step = max(1, -(-(last - first) // TICKS))
    return [1 << power for power in range(first, last + step, step)]


def write_plot(path: str, title: str, rows: Sequence[Row]) -> None:
    """Bandwidth (algbw) over size, one line per contender, the limit dashed."""
    import matplotlib  # noqa: PLC0415 - an extra

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot, ticker  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    for what in dict.fromkeys(row.what for row in rows):
        line = [row for row in rows if row.what == what]
        axes.plot([row.n_bytes for row in line], [row.algbw for row in line], marker="o", markersize=3, label=what)
    limits = {row.n_bytes: algbw(row.n_bytes, row.limit_s) for row in rows if row.limit_s > 0}
    axes.plot(list(limits), list(limits.values()), "k--", label="limit")
    axes.set(xscale="log", yscale="log", xlabel="size of the value", ylabel="algbw", title=title)
    sizes = [row.n_bytes for row in rows]
    axes.set_xticks(size_ticks(min(sizes), max(sizes)))
    axes.xaxis.set_major_formatter(lambda n_bytes, _place: size_label(n_bytes))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    lowest, highest = axes.get_ylim()
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if highest < 1000 * lowest else (1,)))
    axes.yaxis.set_major_formatter(lambda rate, _place: rate_label(rate))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
