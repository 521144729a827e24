"""Reads the timelines that ranks have written (observe/timeline.py), those of the newest run in a folder.

A rank that was killed leaves a last line that is not whole: lines that cannot be read are counted and left out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpikv.common import checks
from mpikv.common.checks import plain
from mpikv.common.files import open_regular
from mpikv.common.progress import Progress
from mpikv.observe.timeline import FORMAT, MOST_BYTES

_number = functools.partial(checks.whole, "a number", least=-checks.LARGEST)
HEADER: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("role", "host", "machine", "store", "type"), plain),
    **dict.fromkeys(("number", "pid", "workers"), _number),
    "date_s": float,
}


class Event(NamedTuple):
    """One record. what: a key or a call, or a list (server: key and worker; clock: role, number, its time)."""

    kind: str
    begun_ns: int
    ended_ns: int
    what: Any
    round: int
    n_bytes: int
    thread: str


@dataclass
class Rank:
    """What one rank has recorded in one store. lost: records that its ring had no room for."""

    header: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    lost: int = 0
    damaged: int = 0

    @property
    def role(self) -> tuple[str, int]:
        return self.header["role"], self.header["number"]

    @property
    def name(self) -> str:
        return "{} {} on {}".format(*self.role, self.header["host"])


class UnreadableError(Exception):
    """There is nothing to show; its text says what to do."""


def read_run(directory: Path) -> list[Rank]:
    """Read the newest run in a folder: workers first, each by its number. Shows its progress."""
    if not directory.is_dir():
        raise UnreadableError(f"{directory}: no such folder")
    paths = sorted(directory.glob("*.jsonl"))
    if not paths:
        raise UnreadableError(f"{directory}: no timeline (*.jsonl); MPIKV_TIMELINE={directory} makes a job write one")
    found, sizes = list[Rank | None](), [path.stat().st_size for path in paths]
    with Progress(f"read {directory}", sum(sizes), "bytes") as progress:
        for path, n_bytes in zip(paths, sizes, strict=True):
            found.append(_read(path))
            progress.update(n_bytes)
    ranks = [rank for rank in found if rank is not None]
    if not ranks:
        raise UnreadableError(f"{directory}: none of {len(paths)} files is a timeline of format {FORMAT}")
    return sorted(_newest(ranks), key=lambda rank: (rank.role[0] != "worker", rank.role[1], rank.header["store"]))


def _read(path: Path) -> Rank | None:
    rank, damaged = None, 0
    with open_regular(path, MOST_BYTES) as file:
        for line in file:
            try:
                entry = json.loads(line.decode(errors="replace"))
                if "format" in entry:
                    if entry["format"] != FORMAT or not HEADER.keys() <= {*entry}:
                        return None
                    header = {**entry, **{name: kind(entry[name]) for name, kind in HEADER.items()}}
                    rank = Rank(header) if rank is None else rank
                elif rank is not None:
                    thread = entry["thread"]
                    rank.events += [_event(record, thread) for record in entry["records"]]
                    rank.lost += _number(entry["lost"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                damaged += 1
    if rank is not None:
        rank.damaged = damaged
        rank.events.sort(key=lambda event: (event.begun_ns, -event.ended_ns))
    return rank


def _event(record: list[Any], thread: str) -> Event:
    """Raises TypeError or ValueError for what is no record."""
    kind, begun_ns, ended_ns, what, round_, n_bytes = record
    if kind == "clock":
        role, number, time_ns = what
        what = [str(role), _number(number), _number(time_ns)]
    elif isinstance(what, list):
        key, worker = what
        what = [plain(key), _number(worker)]
    elif what is not None:
        what = plain(what)
    begun_ns, ended_ns, round_, n_bytes = map(_number, (begun_ns, ended_ns, round_, n_bytes))
    return Event(plain(kind), begun_ns, ended_ns, what, round_, n_bytes, plain(thread))


def _newest(ranks: list[Rank]) -> list[Rank]:
    """Those of the store that was made last, and of others of the same processes."""

    def process(rank: Rank) -> tuple[str, int]:
        return rank.header["host"], rank.header["pid"]

    last = max(ranks, key=lambda rank: rank.header["date_s"])
    processes = {process(rank) for rank in ranks if rank.header["store"] == last.header["store"]}
    stores = {rank.header["store"] for rank in ranks if process(rank) in processes}
    return [rank for rank in ranks if rank.header["store"] in stores]
