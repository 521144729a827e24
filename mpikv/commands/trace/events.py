"""The records of all ranks as events of Chrome's trace format, which Perfetto and chrome://tracing open.

Source of the format: "Trace Event Format", Google (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
A rank is a process; its threads are rows. Slices of a row must lie within each other or apart: transfers of several
keys at a time are spread over as many rows as are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpikv.commands.trace.files import Rank
from mpikv.commands.trace.rounds import Name, Round, Timed, by_rank

PARTS = ("reduce-scatter", "update", "allgather", "copy")  # of a worker's round, one after another
CODING = ("encode", "decode")
SERVING = ("serve", "update", "arrived")
OWN_ROW = ("exchange", "pull", "GPU")
MOST_ARROWS = 4  # from one contribution: with many workers there would be more arrows than can be seen
PROGRAM, SERVER, TRANSFERS, GPU = 0, 50, 100, 900  # the first row of each group

Entry = dict[str, Any]


def events_of(ranks: Sequence[Rank], timed: Sequence[Timed], rounds: dict[Name, Round]) -> Iterator[Entry]:
    """Return all events: names, slices, and arrows from contributions to sums."""
    rows = _Rows()
    for i, (rank, own) in enumerate(zip(ranks, by_rank(ranks, timed), strict=True)):
        yield _meta(i, 0, "process_name", name=f"{rank.name} (pid {rank.header['pid']})")
        yield _meta(i, 0, "process_sort_index", sort_index=i)
        for one in own:
            yield from rows.slices(one, rank)
        yield from rows.rounds(i, own)
    yield from rows.names()
    yield from _arrows(rounds, rows)


class _Rows:
    """Where each record is drawn."""

    def __init__(self) -> None:
        self.row_of: dict[int, int] = {}  # of records, by id
        self._names: dict[tuple[int, int], str] = {}
        self._threads: dict[tuple[int, str], int] = {}
        self._ends: dict[tuple[int, int], float] = {}

    def names(self) -> Iterator[Entry]:
        for (rank, row), name in self._names.items():
            yield _meta(rank, row, "thread_name", name=name)
            yield _meta(rank, row, "thread_sort_index", sort_index=row)

    def slices(self, one: Timed, rank: Rank) -> Iterator[Entry]:
        """What is drawn in the row of its thread, of the server or of the GPU."""
        kind = one.event.kind
        at_server = kind in SERVING and (kind != "update" or isinstance(one.event.what, list))
        if kind in (*PARTS, *CODING) and not at_server:
            return
        if at_server:
            row = self._named(one.rank, SERVER, "server" if rank.role[0] == "worker" else "requests")
        elif kind in OWN_ROW:
            row = self._free(one, *((GPU, "GPU") if kind == "GPU" else (TRANSFERS, "transfers")))
        else:
            row = self._thread(one)
        self.row_of[id(one.event)] = row
        yield _slice(one, row)

    def rounds(self, rank: int, own: Sequence[Timed]) -> Iterator[Entry]:
        """The rounds of one rank: a slice for each, with its parts in it."""
        groups: dict[tuple[str, int], list[Timed]] = {}
        for one in own:
            if one.event.kind in PARTS and not isinstance(one.event.what, list):
                groups.setdefault((one.key, one.event.round), []).append(one)
        for parts in sorted(groups.values(), key=lambda parts: parts[0].begin_us):
            whole = parts[0]._replace(end_us=parts[-1].end_us)
            row = self._free(whole, TRANSFERS, "transfers")
            yield _slice(whole, row, f"{whole.key}, round {whole.event.round}")
            for one in parts:
                self.row_of[id(one.event)] = row
                yield _slice(one, row, one.event.kind)
        for one in own:
            if one.event.kind in CODING:
                yield _slice(one, self._free(one, TRANSFERS + 50, "codec"))

    def _named(self, rank: int, row: int, name: str) -> int:
        self._names.setdefault((rank, row), name)
        return row

    def _thread(self, one: Timed) -> int:
        name = one.event.thread
        key = one.rank, name
        if key not in self._threads:
            n = sum(rank == one.rank for rank, _ in self._threads)
            self._threads[key] = PROGRAM + n
        return self._named(one.rank, self._threads[key], "program" if name == "MainThread" else name)

    def _free(self, one: Timed, first: int, name: str) -> int:
        """The first row of a group in which nothing is at that time."""
        row = first
        while self._ends.get((one.rank, row), -1.0) > one.begin_us:
            row += 1
        self._ends[one.rank, row] = one.end_us
        return self._named(one.rank, row, name if row == first else f"{name} {row - first + 1}")


def _slice(one: Timed, row: int, name: str = "") -> Entry:
    event = one.event
    title = {"call": one.key, "span": one.key, "agree": f"wait: {one.key}", "serve": "serve"}.get(event.kind)
    args: Entry = {"key": one.key} if event.what is not None and title is None else {}
    args |= {name: value for name, value in (("round", event.round), ("bytes", event.n_bytes)) if value}
    if isinstance(event.what, list):
        args["worker"] = event.what[1]
    entry = {"name": name or title or f"{event.kind} {one.key}", "cat": event.kind, "pid": one.rank, "tid": row}
    times = {"ts": round(one.begin_us, 3), "dur": round(max(one.end_us - one.begin_us, 0.0), 3)}
    return {"ph": "X", **entry, **times, **({"args": args} if args else {})}


def _meta(rank: int, row: int, what: str, **args: Any) -> Entry:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": args}


def _arrows(rounds: dict[Name, Round], rows: _Rows) -> Iterator[Entry]:
    number = 0
    for (_, _, key, n), round_ in rounds.items():
        sums: dict[int, Timed] = {}
        for one in round_.sums:
            sums.setdefault(one.rank, one)  # of many pieces of a key the first
        for rank, contribution in round_.contributions.items():
            others = sorted(sums, key=lambda owner: (owner - rank) % (max(sums) + 1))
            for owner in others[:MOST_ARROWS]:
                number += 1
                name = {"name": f"{key}, round {n}", "cat": "contribution", "id": number}
                yield {"ph": "s", **name, **_end(contribution, rows)}
                yield {"ph": "f", "bp": "e", **name, **_end(sums[owner], rows)}


def _end(one: Timed, rows: _Rows) -> Entry:
    return {"pid": one.rank, "tid": rows.row_of[id(one.event)], "ts": round(one.begin_us, 3)}
