"""Where the time of each rank went, and what each key cost. Pure.

A worker's time is from its first contribution to the end of its last one. It computes while it is in no call of the
store. In a call it waits for the worker that contributed last until that one did; from then on for what is sent. A
transfer is hidden as far as the worker computed meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpikv.commands.trace.files import Rank
from mpikv.commands.trace.rounds import Name, Round, Timed, complete
from mpikv.commands.trace.spans import Spans, common, total, union

IN_STORE = ("call", "wait", "agree", "meet", "add", "collective")
WAITS = ("wait", "meet", "collective")  # also for others
MOVES = ("reduce-scatter", "update", "allgather", "copy", "exchange", "pull", "add", "collective")


@dataclass
class WorkerTime:
    """Of one worker, in microseconds. waiting: for which rank. sending: in calls, for what is sent or added. moving: of
    transfers, once all had contributed; hidden: those while it computed.
    """

    whole: float = 0.0
    computing: float = 0.0
    waiting: dict[int, float] = field(default_factory=dict)
    sending: float = 0.0
    moving: float = 0.0
    hidden: float = 0.0
    coding: float = 0.0
    rounds: int = 0

    @property
    def other(self) -> float:
        """In calls, for neither: packing, checking, and agreements."""
        return max(0.0, self.whole - self.computing - sum(self.waiting.values()) - self.sending)


@dataclass
class KeyCost:
    """Of one key, over all workers, in microseconds. waited: in calls, for its transfers. coded: whether it is encoded."""

    rounds: int = 0
    n_bytes: int = 0
    waited: float = 0.0
    moving: float = 0.0
    coded: bool = False


@dataclass
class Analysis:
    """workers: by rank. servers: the share of its time in which each was busy, by rank. keys: the dearest first.

    steps: rounds of the key that was pushed most.
    """

    workers: dict[int, WorkerTime]
    servers: dict[int, float]
    keys: dict[str, KeyCost]
    steps: int


def analysed(ranks: Sequence[Rank], timed: Sequence[Timed], rounds: dict[tuple[str, Name], Round]) -> Analysis:
    """Return the sums over all records."""
    last = {name: (round_.last.rank, round_.last.begin_us) for name, round_ in complete(ranks, rounds)}
    keys: dict[str, KeyCost] = {}
    workers, servers = dict[int, WorkerTime](), dict[int, float]()
    for i, rank in enumerate(ranks):
        own = [one for one in timed if one.rank == i]
        if rank.role[0] == "worker":
            workers[i] = _worker(own, last, keys)
        else:
            serving = union((one.begin_us, one.end_us) for one in own if one.event.kind == "serve")
            servers[i] = total(serving) / (serving[-1][1] - serving[0][0]) if serving else 0.0
    dearest = dict(sorted(keys.items(), key=lambda item: (-item[1].waited, -item[1].moving)))
    return Analysis(workers, servers, dearest, max((worker.rounds for worker in workers.values()), default=0))


def _worker(own: Sequence[Timed], last: dict[Name, tuple[int, float]], keys: dict[str, KeyCost]) -> WorkerTime:
    found = WorkerTime()
    contributions = [one for one in own if one.event.kind in ("push", "pack", "meet", "exchange", "collective")]
    if not contributions:
        return found
    begin = min(one.begin_us for one in contributions)
    end = max(one.end_us for one in own if one.event.kind in (*MOVES, *WAITS, "push", "pack"))
    window = [(begin, end)]
    in_store = common(union(_spans(own, IN_STORE)), window)
    found.whole, found.computing = end - begin, end - begin - total(in_store)
    counts: Counter[str] = Counter(one.key for one in contributions if one.event.kind != "pack")
    found.rounds = max(counts.values())
    sending, moving = Spans(), dict[str, Spans]()
    adding = union(_spans(own, ("add",)))  # in which there are waits for the steps of others
    for one in own:
        span = [(one.begin_us, one.end_us)]
        if one.event.kind == "add" or (one.event.kind in WAITS and common(span, adding) != span):
            since = _wait_for_others(one, last, found.waiting)
            if since < one.end_us:
                sending.append((since, one.end_us))
                keys.setdefault(one.key, KeyCost()).waited += one.end_us - since
        if one.event.kind in MOVES and not isinstance(one.event.what, list):
            since = max(one.begin_us, _last_of(one, last)[1])
            if since < one.end_us:
                moving.setdefault(one.key, []).append((since, one.end_us))
    for key, spans in moving.items():
        keys.setdefault(key, KeyCost()).moving += total(union(spans))
    for one in contributions:
        if one.event.kind != "pack":
            cost = keys.setdefault(one.key, KeyCost())
            cost.rounds, cost.n_bytes = max(cost.rounds, counts[one.key]), max(cost.n_bytes, one.event.n_bytes)
    for one in own:
        if one.event.kind in ("encode", "decode") and one.key in keys:
            keys[one.key].coded = True
    found.coding = total(union(_spans(own, ("encode", "decode"))))
    found.sending = total(common(union(sending), window))
    all_moving = common(union(span for spans in moving.values() for span in spans), window)
    found.moving, found.hidden = total(all_moving), total(all_moving) - total(common(all_moving, in_store))
    return found


def _spans(own: Sequence[Timed], kinds: Sequence[str]) -> list[tuple[float, float]]:
    return [(one.begin_us, one.end_us) for one in own if one.event.kind in kinds]


def _last_of(one: Timed, last: dict[Name, tuple[int, float]]) -> tuple[int, float]:
    """Who contributed last to the round of a record, and when; the record's own begin where that is not known."""
    for kind in ("push", "exchange", "meet", "collective"):
        found = last.get((kind, one.key, one.event.round))
        if found is not None and (kind in ("push", "exchange") or one.event.kind in (kind, "add")):
            return found
    return one.rank, one.begin_us


def _wait_for_others(one: Timed, last: dict[Name, tuple[int, float]], waiting: dict[int, float]) -> float:
    """Count the part of a wait that was for the worker that contributed last. Returns when the other part begins."""
    who, at_us = _last_of(one, last)
    if one.event.kind not in WAITS or who == one.rank:
        return one.begin_us
    came_us = min(max(at_us, one.begin_us), one.end_us)
    waiting[who] = waiting.get(who, 0.0) + came_us - one.begin_us
    return came_us
