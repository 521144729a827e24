"""What belongs together in the timelines of all ranks: the rounds of a key, to which every worker contributes.

A contribution is the begin of a record of one of the kinds CONTRIBUTES. What it goes into is a record of the same key
and round, at a worker or at a server, of one of the kinds SUMS. A moment of KNOWN needs all contributions: it proves
that clocks agree, since nothing comes before what it is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpikv.commands.trace.clocks import ClockOffset
from mpikv.commands.trace.files import Event, Rank

CONTRIBUTES = ("push", "meet", "exchange", "collective")
SUMS = {"push": "update", "meet": "add", "exchange": "update"}
KNOWN = {"push": ("allgather", "end_us"), "meet": ("add", "begin_us"), "exchange": ("update", "begin_us")}

Name = tuple[str, str, str, int]  # of a round: store, kind of contribution, key, number


class Timed(NamedTuple):
    """A record in the common time, in microseconds since the first one. rank: by its place among all ranks."""

    rank: int
    begin_us: float
    end_us: float
    event: Event

    @property
    def key(self) -> str:
        what = self.event.what
        return str(what[0] if isinstance(what, list) else what)


@dataclass
class TimedRound:
    """contributions: the first of each worker, by rank. sums: what they went into. known_us: the moments of KNOWN."""

    contributions: dict[int, Timed] = field(default_factory=dict)
    sums: list[Timed] = field(default_factory=list)
    known_us: list[float] = field(default_factory=list)

    @property
    def last(self) -> Timed:
        """The contribution that came last, for which all others waited."""
        return max(self.contributions.values(), key=lambda timed: timed.begin_us)


def in_common_time(ranks: Sequence[Rank], clocks: dict[str, ClockOffset]) -> list[Timed]:
    """Return all records but the readings of clocks, in the order of their begin."""
    found = []
    for i, rank in enumerate(ranks):
        common = clocks[rank.header["machine"]].common
        some = (event for event in rank.events if event.kind != "clock")
        found += [(i, common(event.begun_ns), common(event.ended_ns), event) for event in some]
    zero_ns = min((begin_ns for _, begin_ns, _, _ in found), default=0.0)
    timed = [Timed(i, (begin_ns - zero_ns) / 1e3, (end_ns - zero_ns) / 1e3, one) for i, begin_ns, end_ns, one in found]
    return sorted(timed, key=lambda one: (one.begin_us, -one.end_us))


def by_rank(ranks: Sequence[Rank], timed: Sequence[Timed]) -> list[list[Timed]]:
    found: list[list[Timed]] = [[] for _ in ranks]
    for one in timed:
        found[one.rank].append(one)
    return found


def rounds_of(ranks: Sequence[Rank], timed: Sequence[Timed]) -> dict[Name, TimedRound]:
    found: dict[Name, TimedRound] = {}
    for one in timed:
        if one.event.kind in CONTRIBUTES and ranks[one.rank].role[0] == "worker":
            name = _name(ranks, one, one.event.kind)
            found.setdefault(name, TimedRound()).contributions.setdefault(one.rank, one)
    for one in timed:
        for kind, sums in SUMS.items():
            known, moment = KNOWN[kind]
            if one.event.kind in (sums, known) and (round_ := found.get(_name(ranks, one, kind))) is not None:
                if one.event.kind == sums:
                    round_.sums.append(one)
                if one.event.kind == known:
                    round_.known_us.append(getattr(one, moment))
    return found


def _name(ranks: Sequence[Rank], one: Timed, kind: str) -> Name:
    """The round of a record. In an asynchronous store each worker's pushes are rounds by themselves."""
    header, key = ranks[one.rank].header, one.key
    if "async" in header["type"]:
        worker = one.event.what[1] if isinstance(one.event.what, list) else header["number"]
        key = f"{key} of worker {worker}"
    return header["store"], kind, key, one.event.round


def complete(ranks: Sequence[Rank], rounds: dict[Name, TimedRound]) -> Iterator[tuple[Name, TimedRound]]:
    """Those to which every worker of a synchronous store has contributed, while it wrote its timeline."""
    headers = {rank.header["store"]: rank.header for rank in ranks}
    for name, round_ in rounds.items():
        header = headers[name[0]]
        if len(round_.contributions) == header["workers"] and "async" not in header["type"]:
            yield name, round_


def too_early(ranks: Sequence[Rank], rounds: dict[Name, TimedRound]) -> tuple[int, int, float]:
    """Check the clocks: how many results there are, how many came before the last contribution to them, and by how many
    microseconds at most.
    """
    early = [round_.last.begin_us - at_us for _, round_ in complete(ranks, rounds) for at_us in round_.known_us]
    wrong = [one for one in early if one > 0]
    return len(early), len(wrong), max(wrong, default=0.0)
