"""What `mpikv trace report` prints: a line for each rank, the keys that cost most, and what to do (advice.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpikv.commands.tables import Column, Table
from mpikv.commands.trace.advice import advice, slowest_of
from mpikv.commands.trace.analysis import Analysis
from mpikv.commands.trace.files import Rank

MOST_KEYS = 10
KEY_CHARS = 28
LEGEND = """computing: outside the store. waiting: for the worker that came last; the one named most of all. sending: in
calls, for what is sent or added once all have come. other: in calls, for packing, checks and agreements. hidden: the
share of what is sent that goes on while the worker computes."""


def report(ranks: Sequence[Rank], analysis: Analysis) -> Iterator[str]:
    yield from _workers(ranks, analysis)
    for rank, share in analysis.servers.items():
        yield f"{ranks[rank].name}: busy for {share:.0%} of its time"
    yield from _keys(analysis)
    lost = sum(rank.lost for rank in ranks)
    if lost:
        yield f"{lost} records were lost, more than a rank could write: times of short calls are too small here"
    yield ""
    yield f"advice: {advice(ranks, analysis)}"


def _workers(ranks: Sequence[Rank], analysis: Analysis) -> Iterator[str]:
    table = Table(
        *(Column("rank", 24, left=True), Column("time", 9), Column("computing", 9), Column("waiting", 8)),
        *(Column("for", 10), Column("sending", 8), Column("other", 6), Column("hidden", 7)),
    )
    yield f"shares of each worker's time from its first push to the end; {analysis.steps} rounds"
    yield table.head()
    for i, worker in analysis.workers.items():
        if not worker.whole:
            yield table.line(ranks[i].name, *[""] * 7)
            continue
        most = max(worker.waiting, key=lambda rank: worker.waiting[rank], default=None)
        whom = "" if most is None else "{} {}".format(*ranks[most].role)
        parts = (worker.computing, sum(worker.waiting.values()), worker.sending, worker.other)
        computing, waiting, sending, other = (f"{part / worker.whole:.1%}" for part in parts)
        hidden = f"{worker.hidden / worker.moving:.0%}" if worker.moving else ""
        time = f"{worker.whole / 1e6:.3f} s"
        yield table.line(ranks[i].name, time, computing, waiting, whom, sending, other, hidden)
    yield LEGEND
    slowest = slowest_of(analysis)
    if slowest is not None:
        rank, waits_us = slowest
        yield f"slowest: {ranks[rank].name}; each other worker waits {waits_us / 1e3:.1f} ms a round for it"


def _keys(analysis: Analysis) -> Iterator[str]:
    if not analysis.keys:
        return
    table = Table(
        *(Column("key", KEY_CHARS, left=True), Column("bytes", 11), Column("rounds", 7)),
        *(Column("waited", 10), Column("sending", 10)),
    )
    shown = [*analysis.keys.items()][:MOST_KEYS]
    yield f"{len(shown)} of {len(analysis.keys)} keys, the dearest first; milliseconds a round, mean of the workers"
    yield table.head()
    for key, cost in shown:
        rounds = max(1, cost.rounds) * len(analysis.workers) * 1e3
        name = key if len(key) <= KEY_CHARS else f"{key[: KEY_CHARS - 3]}..."
        yield table.line(name, cost.n_bytes, cost.rounds, f"{cost.waited / rounds:.3f}", f"{cost.moving / rounds:.3f}")
