"""The JSON file that rank 0 writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpikv.commands.bench.report import Row
from mpikv.errors import ConfigError

FORMAT = 1  # of the JSON file; another number when a field changes its meaning


def document(
    command: str, found: Mapping[str, Any], rows: Sequence[Row], notes: Sequence[str], **more: Any
) -> dict[str, Any]:
    """Return everything of one run, for JSON."""
    return {
        "format": FORMAT,
        "command": command,
        **found,
        "rows": [asdict(row) for row in rows],
        "notes": list(notes),
        **more,
    }


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """Write the file. Raises OSError where it cannot be written."""
    Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def check_writable(option: str, path: str) -> None:
    """Raise ConfigError where the file cannot be written: before an hour of measuring, not after it."""
    folder = Path(path).resolve().parent
    if Path(path).is_dir():
        raise ConfigError(f"{option} {path}: it is a folder")
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}")
