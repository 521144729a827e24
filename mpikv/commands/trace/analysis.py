"""Where the time of each rank went, and what each key cost. Pure.

A worker's time is from its first push to the end of its last transfer. It computes while it is in no call of the store.
In a call it waits for the worker that pushed last, until that one has; from then on for what is sent. What is sent is
hidden as far as the worker computes meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mpikv.commands.trace.files import Rank
from mpikv.commands.trace.rounds import CONTRIBUTES, Name, Timed, TimedRound, by_rank, complete

WAITS = ("wait", "meet", "collective")  # for others, and then for what is sent
IN_STORE = (*WAITS, "call", "agree", "add")
MOVES = ("reduce-scatter", "update", "allgather", "copy", "exchange", "pull", "add", "collective")
CODING = ("encode", "decode")

Spans = list[tuple[float, float]]  # moments: sorted, and apart from each other
Last = dict[Name, tuple[int, float]]  # who contributed last to a round, and when


@dataclass
class WorkerTime:
    """Of one worker, in microseconds. waiting: for each rank that came last. sending: in calls, for what is sent or
    added. moving: of what is sent or added, once all have pushed; hidden: that while it computed. coding: by codecs.
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
        """In calls, for neither: packing, checks, and agreements."""
        return max(0.0, self.whole - self.computing - sum(self.waiting.values()) - self.sending)


@dataclass
class KeyCost:
    """Of one key over all workers, in microseconds. waited: a part of `sending`. moving: as there. coded: is it."""

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

    workers: dict[int, WorkerTime] = field(default_factory=dict)
    servers: dict[int, float] = field(default_factory=dict)
    keys: dict[str, KeyCost] = field(default_factory=dict)
    steps: int = 0


def analysed(ranks: Sequence[Rank], timed: Sequence[Timed], rounds: dict[Name, TimedRound]) -> Analysis:
    last = {name: (round_.last.rank, round_.last.begin_us) for name, round_ in complete(ranks, rounds)}
    found, keys = Analysis(), defaultdict[str, KeyCost](KeyCost)
    for i, (rank, own) in enumerate(zip(ranks, by_rank(ranks, timed), strict=True)):
        if rank.role[0] == "worker":
            found.workers[i] = _Worker(rank, own, last, keys).count()
        else:
            serving = union(_spans(own, ("serve",)))
            found.servers[i] = total(serving) / (serving[-1][1] - serving[0][0]) if serving else 0.0
    found.keys = dict(sorted(keys.items(), key=lambda item: (-item[1].waited, -item[1].moving)))
    found.steps = max((worker.rounds for worker in found.workers.values()), default=0)
    return found


class _Worker:
    """The records of one worker, but for those of a server within it. keys: what its keys cost is added there."""

    def __init__(self, rank: Rank, own: Sequence[Timed], last: Last, keys: defaultdict[str, KeyCost]) -> None:
        self._own = [one for one in own if not isinstance(one.event.what, list)]
        self._store, self._last, self._keys = rank.header["store"], last, keys
        # In a call in common memory there are waits for the steps of others, without a round.
        self._waits_by_round = "async" not in rank.header["type"]
        self._moves = [one for one in self._own if one.event.kind in MOVES]
        self._begins = [one.begin_us for one in self._moves]
        self._longest_us = max((one.end_us - one.begin_us for one in self._moves), default=0.0)

    def count(self) -> WorkerTime:
        own, found = self._own, WorkerTime()
        pushes = [one for one in own if one.event.kind in (*CONTRIBUTES, "pack")]
        if not pushes:
            return found
        begin = pushes[0].begin_us
        end = max(one.end_us for one in own if one.event.kind in (*MOVES, *WAITS, "push", "pack"))

        def within(spans: Spans) -> Spans:
            return common(union(spans), [(begin, end)])

        in_store, moving = within(_spans(own, IN_STORE)), within(self._moving())
        found.whole, found.computing = end - begin, end - begin - total(in_store)
        found.coding = total(within(_spans(own, CODING)))
        found.sending = total(within(self._sending(found.waiting)))
        found.moving, found.hidden = total(moving), total(moving) - total(common(moving, in_store))
        found.rounds = self._count_rounds(pushes)
        return found

    def _sending(self, waiting: dict[int, float]) -> Spans:
        """The parts of waits that are not for a worker; those that are, are added to `waiting`."""
        spans = Spans()
        for one in self._own:
            kind = one.event.kind
            if kind not in (*WAITS, "add") or (kind == "wait" and self._waits_by_round and not one.event.round):
                continue
            since_us, (who, last_us) = one.begin_us, self._last_of(one)
            if who != one.rank and kind != "add":
                since_us = min(max(last_us, since_us), one.end_us)
                waiting[who] = waiting.get(who, 0.0) + since_us - one.begin_us
            if since_us < one.end_us:
                spans.append((since_us, one.end_us))
                self._charge(since_us, one)
        return spans

    def _charge(self, since_us: float, wait: Timed) -> None:
        """Divide a wait between the keys that were sent meanwhile, by their bytes: a call waits for its first key."""
        first = bisect_left(self._begins, since_us - self._longest_us)
        until = bisect_left(self._begins, wait.end_us)
        sent = [one for one in self._moves[first:until] if one.end_us > since_us] or [wait]
        n_bytes = sum(max(1, one.event.n_bytes) for one in sent)
        for one in sent:
            self._keys[one.key].waited += max(1, one.event.n_bytes) / n_bytes * (wait.end_us - since_us)

    def _moving(self) -> Spans:
        """When something was sent or added, from when all had pushed."""
        by_key = defaultdict[str, Spans](Spans)
        for one in self._moves:
            since_us = max(one.begin_us, self._last_of(one)[1])
            if since_us < one.end_us:
                by_key[one.key].append((since_us, one.end_us))
        for key, spans in by_key.items():
            self._keys[key].moving += total(union(spans))
        return [span for spans in by_key.values() for span in spans]

    def _count_rounds(self, pushes: Sequence[Timed]) -> int:
        # Of a key that is divided the workers' part is a push, and the servers' part an exchange, of the same round.
        exchanges = Counter(one.key for one in pushes if one.event.kind == "exchange")
        counts = Counter(one.key for one in pushes if one.event.kind not in {"pack", "exchange"}) | exchanges
        coded = {one.key for one in self._own if one.event.kind in CODING}
        for one in (one for one in pushes if one.key in counts):
            cost = self._keys[one.key]
            cost.rounds, cost.n_bytes = max(cost.rounds, counts[one.key]), max(cost.n_bytes, one.event.n_bytes)
            cost.coded |= one.key in coded
        return max(counts.values(), default=0)

    def _last_of(self, one: Timed) -> tuple[int, float]:
        """Who contributed last to the round of a record, and when; the record's own begin where that is not known."""
        own = {"meet": "meet", "add": "meet", "collective": "collective"}.get(one.event.kind)
        for kind in ("push", "exchange") if own is None else (own,):
            found = self._last.get((self._store, kind, one.key, one.event.round))
            if found is not None:
                return found
        return one.rank, one.begin_us


def _spans(own: Iterable[Timed], kinds: Sequence[str]) -> Spans:
    return [(one.begin_us, one.end_us) for one in own if one.event.kind in kinds]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > begin:
            found.append((begin, end))
    return found


def common(one: Spans, other: Spans) -> Spans:
    found, i, j = Spans(), 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def total(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
