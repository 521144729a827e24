"""The agreement of all workers, as a pure state machine: proposals in, verdicts out (docs/adr/0002).

It runs at worker 0. A worker proposes something under a topic and a name (`init` of key 'w', the third `barrier`); when
every worker has proposed the same thing, the topic's rule makes a result of what they brought, or an error, and
everybody gets that verdict. Workers that wait for each other and for nobody else are released with a provisional
verdict where they initialise keys in different orders; else each gets an error that names the call in which each is. So
does who proposes anything when a worker has closed its store.

Workers that are held until all are (stop.py) make no mistake: they are released where others wait for them. And the
verdict that all close comes after that on where all stop, so that nobody is told of this who has ended.

Cost: two messages per worker and proposal. No clock, no MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpikv import errors
from mpikv.common.checks import shown
from mpikv.errors import MpikvError, PeerError
from mpikv.placement.keys import Key

Name = Key
Item = tuple[str, Name]
ROUND = "round"  # the topic that no call proposes, but a round whose labels differ: no worker waits in it
STOP, HELD = ("stop", 0), ("held", 0)  # of stopping together (stop.py): a worker's reads so far, and that it is held


class Disagreement(Exception):  # noqa: N818 - it is one
    """Raised by a rule: the verdict is this error, on every worker."""

    def __init__(self, kind: type[MpikvError], text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Verdict(NamedTuple):
    """To `worker`: how the proposal ended, by `result` or by `error`, which is (class name, text)."""

    worker: int
    topic: str
    name: Name
    result: Any
    error: tuple[str, str] | None
    final: bool

    def exception(self) -> MpikvError:
        name, text = self.error or ("MpikvError", "")
        kind: type[MpikvError] = getattr(errors, name)
        return kind(text)

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.exception()
        return self.result


class Proposal:
    """A request that is done when each of its items has a verdict."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = tuple(items)
        self.verdicts: dict[Item, Verdict] = {}  # in the order in which they came
        self._missing = set(items)

    def take(self, verdict: Verdict) -> bool:
        """Note a verdict; False where it is not one that this proposal waits for."""
        item = verdict.topic, verdict.name
        if item not in self._missing:
            return False
        self._missing.remove(item)
        self.verdicts[item] = verdict
        return True

    def test(self) -> bool:
        return not self._missing


@dataclass(slots=True)
class _Open:
    payloads: dict[int, Any] = field(default_factory=dict)
    reserved: Any = None  # what a provisional verdict has already promised
    error: Disagreement | None = None  # the verdict is known before all have come


Rule = Callable[[Name, Sequence[Any], Sequence[str]], Any]


def call_text(topic: str, name: Name) -> str:
    """Write a proposal as the user wrote it."""
    return f"init({shown(name)})" if topic == "init" else f"{topic}()"


def grouped(payloads: Sequence[Any], labels: Sequence[str]) -> str:
    """Who brought what: 'float32 (2,): worker 0 on a; float32 (3,): worker 1 on b'."""
    groups: dict[str, list[str]] = {}
    for payload, label in zip(payloads, labels, strict=True):
        groups.setdefault(str(payload), []).append(label)
    return "; ".join(f"{', '.join(who)}: {what}" for what, who in groups.items())


class Agreement:
    """Worker 0's side of every agreement.

    labels: how each worker is named in errors ('worker 1 on h2'). rules: topic -> rule; without one the result is what
    worker 0 brought. reserve(name, payload): for `init`, what every rank must know of the key (its number, where its
    shards live), fixed when it is first proposed.
    """

    def __init__(self, labels: Sequence[str], rules: Mapping[str, Rule], reserve: Callable[[Name, Any], Any]) -> None:
        self._labels = list(labels)
        self._rules = rules
        self._reserve = reserve
        self._open: dict[Item, _Open] = {}
        self._waiting: dict[int, set[Item]] = {worker: set() for worker in range(len(labels))}
        self._closed: set[int] = set()

    def propose(self, worker: int, items: Sequence[tuple[str, Name, Any]]) -> list[Verdict]:
        """Take a worker's proposals, and return the verdicts that follow; it waits for a verdict on each of them."""
        verdicts: list[Verdict] = []
        for topic, name, payload in items:
            item = (topic, name)
            proposal = self._open.setdefault(item, _Open())
            if worker in proposal.payloads:
                verdicts.append(self._error(worker, item, MpikvError, f"{call_text(*item)} twice"))
                continue
            proposal.payloads[worker] = payload
            if topic != ROUND:
                self._waiting[worker].add(item)
            if topic == "close":
                self._closed.add(worker)
            if topic == "init" and proposal.reserved is None and proposal.error is None:
                try:
                    proposal.reserved = self._reserve(name, payload)
                except Disagreement as refused:
                    proposal.error = refused
            if proposal.error is not None:
                verdicts += self._fail(item, [worker])
            elif self._is_complete(item):
                verdicts += self._decide(item)
                if item == STOP:
                    closing = [other for other in self._open if other[0] == "close" and self._is_complete(other)]
                    verdicts += [verdict for other in closing for verdict in self._decide(other)]
        if self._closed:
            verdicts += self._fail_what_cannot_complete()
        if STOP in self._open:  # the last answer comes soon, and who is stuck then is seen to
            return verdicts
        stuck = self._stuck()
        if any(HELD in self._waiting[worker] for worker in stuck):
            verdicts += self._settle(HELD, None)
            stuck = self._stuck()
        if stuck:
            verdicts += self._untangle(stuck)
        return verdicts

    def _is_complete(self, item: Item) -> bool:
        """Whether every worker has come to an item; to `close` only when all have answered where they can stop."""
        all_came = len(self._open[item].payloads) == len(self._labels)
        return all_came and not (item[0] == "close" and STOP in self._open)

    def _stuck(self) -> set[int]:
        """The workers that wait for each other and for nobody else, so that none of them can move by itself.

        Starts from all who wait, and takes out who waits for somebody outside, until nothing changes.
        """
        stuck = {worker for worker, items in self._waiting.items() if items}
        while stuck:
            # Mostly the first of those outside is missing everywhere, so that this is no look at all workers per item.
            outside = self._waiting.keys() - stuck
            lacks_outsider = {item for item, proposal in self._open.items() if not outside <= proposal.payloads.keys()}
            movable = {worker for worker in stuck if not self._waiting[worker].isdisjoint(lacks_outsider)}
            if not movable:
                break
            stuck -= movable
        return stuck

    def _decide(self, item: Item) -> list[Verdict]:
        proposal, result = self._open[item], self._judged(item)
        if isinstance(result, Disagreement):
            proposal.error = result
            return self._fail(item, list(proposal.payloads))
        return self._settle(item, proposal.reserved if item[0] == "init" else result)

    def _judged(self, item: Item) -> Any:
        """What the topic's rule makes of what has been brought so far: a result or a Disagreement."""
        topic, name = item
        come = sorted(self._open[item].payloads)
        payloads = [self._open[item].payloads[worker] for worker in come]
        if topic not in self._rules:
            return payloads[0]
        try:
            return self._rules[topic](name, payloads, [self._labels[worker] for worker in come])
        except Disagreement as disagreement:
            return disagreement

    def _settle(self, item: Item, result: Any) -> list[Verdict]:
        """Send an item's result to the workers that have proposed it."""
        workers = sorted(self._open.pop(item).payloads)
        for items in self._waiting.values():
            items.discard(item)
        return [Verdict(worker, *item, result, None, final=True) for worker in workers]

    def _fail(self, item: Item, workers: Sequence[int]) -> list[Verdict]:
        """Send an item's error to these workers; to others when they propose it."""
        proposal = self._open[item]
        assert proposal.error is not None
        if len(proposal.payloads) == len(self._labels):
            del self._open[item]
        return [self._error(worker, item, proposal.error.kind, str(proposal.error)) for worker in workers]

    def _error(self, worker: int, item: Item, kind: type[MpikvError], text: str) -> Verdict:
        self._waiting[worker].discard(item)
        return Verdict(worker, *item, None, (kind.__name__, text), final=True)

    def _fail_what_cannot_complete(self) -> list[Verdict]:
        gone = ", ".join(self._labels[worker] for worker in sorted(self._closed))
        verdicts = []
        for item, proposal in list(self._open.items()):
            if item[0] in {"close", ROUND, STOP[0], HELD[0]} or self._closed <= proposal.payloads.keys():
                continue
            text = (
                f"{call_text(*item)} needs every worker, and {gone} closed the store already (its program ended early?)"
            )
            for worker in self._open.pop(item).payloads:
                verdicts.append(self._error(worker, item, PeerError, text))
        return verdicts

    def _untangle(self, stuck: set[int]) -> list[Verdict]:
        """Release workers that wait for each other in different calls."""
        waiting = {worker: sorted(self._waiting[worker], key=str) for worker in sorted(stuck)}
        inits = {worker: [item for item in items if item[0] == "init"] for worker, items in waiting.items()}
        elsewhere = {worker for worker, items in inits.items() if not items}
        wanted = {item for items in inits.values() for item in items}
        # A worker that waits elsewhere has made its inits, or never will.
        if wanted and all(elsewhere <= self._open[item].payloads.keys() for item in wanted):
            return self._release(inits)
        where = "; ".join(
            f"{self._labels[worker]}: {', '.join(call_text(*item) for item in items)}"
            for worker, items in waiting.items()
        )
        text = f"the workers wait for each other in different calls, which all of them must make: {where}"
        verdicts = []
        for worker, items in waiting.items():
            for item in items:
                self._open.pop(item, None)
                verdicts.append(self._error(worker, item, MpikvError, text))
        return verdicts

    def _release(self, waiting: Mapping[int, Sequence[Item]]) -> list[Verdict]:
        """Workers are in an `init` of different keys: let them go on with what those before them have brought.

        Who waits for a key that differs already stays, so that its error names all workers, unless nobody could go on.
        """
        items = {item: self._judged(item) for item in {item for items in waiting.values() for item in items}}
        verdicts = []
        for worker, mine in waiting.items():
            for item in mine:
                if not isinstance(items[item], Disagreement):
                    self._waiting[worker].discard(item)
                    verdicts.append(Verdict(worker, *item, self._open[item].reserved, None, final=False))
        if all(self._waiting[worker] for worker in waiting):
            for item, judged in items.items():
                if isinstance(judged, Disagreement):
                    self._open[item].error = judged
                    verdicts += self._fail(item, sorted(self._open[item].payloads))
        return verdicts
