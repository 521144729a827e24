"""Timelines that are written by hand, for tests of what reads them. Times are in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpikv.commands.trace.analysis import Analysis, analysed
from mpikv.commands.trace.clocks import clocks_of
from mpikv.commands.trace.files import Event, Rank
from mpikv.commands.trace.rounds import Name, Timed, TimedRound, in_common_time, rounds_of

Record = tuple[Any, ...]  # kind, begin, end, what, round and bytes, of which the last two may be missing


def record(kind: str, begin_ms: float, end_ms: float, *about: Any) -> list[Any]:
    """As a line of a file has it."""
    return [kind, round(begin_ms * 1e6), round(end_ms * 1e6), *about, *(None, 0, 0)[len(about) :]]


def header(role: str, number: int, workers: int, **changes: Any) -> dict[str, Any]:
    """The first line of a file."""
    mine = {"format": 1, "role": role, "number": number, "workers": workers, "host": "a", "machine": "a", "pid": 100}
    return {**mine, "store": "s", "type": "dist_sync", "date_s": 1.0, "begun_ns": 0, **changes}


def rank(role: str, number: int, workers: int, *records: Record, **changes: Any) -> Rank:
    """One rank, all of whose records are of its main thread."""
    return Rank(header(role, number, workers, **changes), [Event(*record(*one), "MainThread") for one in records])


def write(directory: Path, name: str, *lines: Any) -> None:
    """Write a file. lines: JSON, or text that is none."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))


def records(*some: Record, lost: int = 0) -> dict[str, Any]:
    """A line with records."""
    return {"thread": "MainThread", "records": [record(*one) for one in some], "lost": lost}


def together(ranks: Sequence[Rank]) -> tuple[list[Timed], dict[Name, TimedRound]]:
    """What all of them say."""
    timed = in_common_time(ranks, clocks_of(ranks))
    return timed, rounds_of(ranks, timed)


def analysis_of(ranks: Sequence[Rank]) -> Analysis:
    """Where their time went."""
    return analysed(ranks, *together(ranks))
