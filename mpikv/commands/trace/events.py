"""The records of all ranks as events of Chrome's trace format, which Perfetto and chrome://tracing open.

Source of the format: "Trace Event Format", Google (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
A rank is a process; its threads are rows. Slices of a row must lie within each other or apart, to the nanosecond, else
Perfetto leaves one out: transfers of several keys at a time are spread over as many rows as are needed. Rows are shown
in the order of their numbers, of which none is 0; the first, which has the number of the process, is the program's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from mpikv.commands.trace.files import Rank
from mpikv.commands.trace.rounds import Name, Timed, TimedRound, by_rank

PARTS = ("reduce-scatter", "update", "allgather", "copy")  # of a worker's round, one after another
CODING = ("encode", "decode")
SERVING = ("serve", "update", "arrived")
EXCHANGES = ("exchange", "pull")
MOST_ARROWS = 4  # from one contribution: with many workers there would be more arrows than can be seen
PROGRAM, SERVER, TRANSFERS, CODEC, GPU = 0, 50, 100, 500, 900  # the first row of each group
PUSH_US = 1.0  # how long the moment of a push is drawn
ROWS = 1000  # numbers of a rank
LAST = {TRANSFERS: CODEC - 1, CODEC: GPU - 1, GPU: ROWS - 1}  # of a group; what is too much for it lies over the rest

Entry = dict[str, Any]


def events_of(ranks: Sequence[Rank], timed: Sequence[Timed], rounds: dict[Name, TimedRound]) -> Iterator[Entry]:
    """Yield all events: names, slices, and arrows from contributions to sums."""
    rows, digits = _Rows(), len(str(max((rank.role[1] for rank in ranks), default=0)))
    for i, (rank, own) in enumerate(zip(ranks, by_rank(ranks, timed), strict=True)):
        role, number = rank.role  # in a form whose order is that of the numbers
        name = f"{role} {number:0{digits}} on {rank.header['host']} (pid {rank.header['pid']})"
        yield _meta(i, 0, "process_name", name=name)
        yield _meta(i, 0, "process_sort_index", sort_index=i)
        for one in own:
            yield from rows.slices(one, rank)
        yield from rows.exchanges(own)
        yield from rows.rounds(own)
    for (i, row), name in rows.names.items():
        yield _meta(i, row, "thread_name", name=name)
    yield from _arrows(rounds, rows)


class _Rows:
    """Where each record is drawn."""

    def __init__(self) -> None:
        self.row_of: dict[int, int] = {}  # of records, by their ids
        self.names: dict[tuple[int, int], str] = {}
        self._threads = defaultdict[int, dict[str, int]](dict)  # by rank
        self._ends: dict[tuple[int, int], float] = {}

    def place_of(self, one: Timed) -> Entry:
        return _place(one.rank, self.row_of[id(one.event)])

    def slices(self, one: Timed, rank: Rank) -> Iterator[Entry]:
        """What is drawn in the row of its thread, of the server or of the GPU."""
        kind = one.event.kind
        at_server = kind in SERVING and (kind != "update" or isinstance(one.event.what, list))
        if kind in (*PARTS, *CODING, *EXCHANGES) and not at_server:
            return
        if at_server:
            row = self._named(one.rank, SERVER, "server" if rank.role[0] == "worker" else "requests")
        elif kind == "GPU":
            row = self._free(one, GPU, "GPU")
        else:
            row = self._thread(one)
        self.row_of[id(one.event)] = row
        yield _slice(one, row)

    def exchanges(self, own: Sequence[Timed]) -> Iterator[Entry]:
        """Calls to servers: a slice for all keys of a call, which have one begin."""
        calls = defaultdict[tuple[str, float], list[Timed]](list)
        for one in own:
            if one.event.kind in EXCHANGES:
                calls[one.event.kind, one.begin_us].append(one)
        for some in calls.values():
            whole = some[0]._replace(end_us=max(one.end_us for one in some))
            row = self._free(whole, TRANSFERS, "transfers")
            self.row_of |= {id(one.event): row for one in some}
            more = f" and {len(some) - 1} more" if len(some) > 1 else ""
            yield _slice(whole, row, f"{whole.event.kind} {whole.key}{more}")
            if whole.event.kind == "exchange":  # arrows are drawn from the ends of slices
                pushed_us = min(whole.begin_us + PUSH_US, whole.end_us)
                yield _slice(whole._replace(end_us=pushed_us), row, "push")

    def rounds(self, own: Sequence[Timed]) -> Iterator[Entry]:
        """The rounds of one rank: a slice for each, with its parts in it."""
        groups = defaultdict[tuple[str, int], list[Timed]](list)
        for one in own:
            if one.event.kind in PARTS and not isinstance(one.event.what, list):
                groups[one.key, one.event.round].append(one)
        for parts in sorted(groups.values(), key=lambda parts: parts[0].begin_us):
            whole = parts[0]._replace(end_us=parts[-1].end_us)
            row = self._free(whole, TRANSFERS, "transfers")
            yield _slice(whole, row, f"{whole.key}, round {whole.event.round}")
            for one in parts:
                self.row_of[id(one.event)] = row
                yield _slice(one, row, one.event.kind)
        for one in own:
            if one.event.kind in CODING:
                yield _slice(one, self._free(one, CODEC, "codec"))

    def _named(self, rank: int, row: int, name: str) -> int:
        self.names.setdefault((rank, row), name)
        return row

    def _thread(self, one: Timed) -> int:
        name, threads = one.event.thread, self._threads[one.rank]
        row = threads.setdefault(name, min(PROGRAM + len(threads), SERVER - 1))
        return self._named(one.rank, row, "program" if name == "MainThread" else name)

    def _free(self, one: Timed, first: int, name: str) -> int:
        """The first row of a group in which nothing is at that time."""
        row = first
        while row < LAST[first] and self._ends.get((one.rank, row), -1.0) > one.begin_us:
            row += 1
        self._ends[one.rank, row] = one.end_us
        return self._named(one.rank, row, name if row == first else f"{name} {row - first + 1}")


def _slice(one: Timed, row: int, name: str = "") -> Entry:
    event, begin_ns = one.event, _ns(one.begin_us)
    title = {"call": one.key, "span": one.key, "agree": f"wait: {one.key}", "serve": "serve"}.get(event.kind)
    args: Entry = {"key": one.key} if event.what is not None and title is None else {}
    args |= {what: value for what, value in (("round", event.round), ("bytes", event.n_bytes)) if value}
    if isinstance(event.what, list):
        args["worker"] = event.what[1]
    entry = {"name": name or title or f"{event.kind} {one.key}", "cat": event.kind, **_place(one.rank, row)}
    times = {"ts": begin_ns / 1e3, "dur": (_ns(one.end_us) - begin_ns) / 1e3}
    return {"ph": "X", **entry, **times, **({"args": args} if args else {})}


def _meta(rank: int, row: int, what: str, **args: Any) -> Entry:
    return {"ph": "M", "name": what, **_place(rank, row), "args": args}


def _place(rank: int, row: int) -> Entry:
    return {"pid": (rank + 1) * ROWS, "tid": (rank + 1) * ROWS + row}


def _ns(time_us: float) -> int:
    return round(time_us * 1e3)


def _arrows(rounds: dict[Name, TimedRound], rows: _Rows) -> Iterator[Entry]:
    number = 0
    for (_, _, key, n), round_ in rounds.items():
        sums: dict[int, Timed] = {}
        for one in round_.sums:
            sums.setdefault(one.rank, one)  # of many pieces of a key the first
        n_owners = max(sums, default=0) + 1
        for rank, contribution in round_.contributions.items():
            others = sorted(sums, key=lambda owner: (owner - rank) % n_owners)
            begin_ns = _ns(contribution.begin_us)
            for owner in others[:MOST_ARROWS]:
                # Into the slice, and never back in time: clocks may differ by some microseconds.
                end_ns = max(_ns(sums[owner].begin_us), begin_ns) + 1
                if end_ns >= _ns(sums[owner].end_us):
                    continue
                number += 1
                name = {"name": f"{key}, round {n}", "cat": "contribution", "id": number}
                yield {"ph": "s", **name, **rows.place_of(contribution), "ts": begin_ns / 1e3}
                yield {"ph": "f", "bp": "e", **name, **rows.place_of(sums[owner]), "ts": end_ns / 1e3}
