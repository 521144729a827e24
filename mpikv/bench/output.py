"""What rank 0 leaves behind: a JSON file, and a picture of bandwidth over size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpikv.bench.report import Row
from mpikv.bench.statistics import algbw
from mpikv.errors import ConfigError

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
        raise ConfigError("--plot needs matplotlib: pip install 'mpikv[bench]'") from None


def write_plot(path: str, title: str, rows: Sequence[Row]) -> None:
    """Bandwidth (algbw) over size, one line per contender, the limit dashed."""
    import matplotlib  # noqa: PLC0415 - an extra

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    for what in dict.fromkeys(row.what for row in rows):
        line = [row for row in rows if row.what == what]
        axes.plot([row.n_bytes for row in line], [row.algbw for row in line], marker="o", markersize=3, label=what)
    limits = {row.n_bytes: algbw(row.n_bytes, row.limit_s) for row in rows if row.limit_s > 0}
    axes.plot(list(limits), list(limits.values()), "k--", label="limit")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="algbw, GB/s", title=title)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
