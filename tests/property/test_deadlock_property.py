"""Random programs of rounds, barriers and `init`s in several stores, against a model that knows which can go on.

Some wait for a while only, and then go on without what they have waited for. An `init` ends as worker 0 decides.

Whoever asks sees each worker at another moment: no circle is found in what it has seen unless the workers in it can
never go on, and one is found as soon as nobody moves any more.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grids
import pytest

from mpikv.observe.deadlock import Blocked, WaitFact, circle, compare, deadlocks
from mpikv.session.agreement import Agreement

BARRIER = "barrier"
Op = tuple[str, Any]  # a store, and a key of it, BARRIER or ("init", key)


@dataclass
class Worker:
    """What it calls, one after the other; `at`: how many of these it has begun; each waits for all of its store."""

    program: list[Op]
    at: int = 0
    waits: bool = False
    limited: frozenset[int] = frozenset()  # which of these calls wait with a limit of their own
    reached: Counter[Op] = field(default_factory=Counter)


def is_init(op: Op) -> bool:
    return isinstance(op[1], tuple)


class Model:
    """Workers, and which of them are in which store."""

    def __init__(self, chance: random.Random, *, alike: bool) -> None:
        self.chance = chance
        n = chance.randint(2, 5)
        self.stores = {"a": range(n), "b": sorted(chance.sample(range(n), chance.randint(2, n)))}
        self.agreements = {
            store: Agreement([f"worker {i}" for i in its], {}, lambda name, _: name)
            for store, its in self.stores.items()
        }
        limits = chance.random() < 0.3
        self.decided: set[tuple[int, Op]] = set()
        inits = [("init", key) for key in "xyz"]
        calls = [
            (store, chance.choice([0, 1, BARRIER, *inits])) for store in chance.choices("ab", k=chance.randint(1, 8))
        ]
        calls = [op for i, op in enumerate(calls) if not is_init(op) or op not in calls[:i]]
        self.workers = [Worker([op for op in calls if i in self.stores[op[0]]]) for i in range(n)]
        # Keys that are initialised one after the other may come in any order.
        run = {
            op: (op[0], sum(other[0] != op[0] or not is_init(other) for other in calls[:i]))
            for i, op in enumerate(calls)
        }
        for worker in self.workers:
            for i in range(len(worker.program) - 1):
                two = worker.program[i : i + 2]
                if all(map(is_init, two)) and run[two[0]] == run[two[1]] and chance.random() < 0.5:
                    worker.program[i : i + 2] = two[::-1]
            if limits and chance.random() < 0.5:
                may = [i for i, op in enumerate(worker.program) if not is_init(op)]
                worker.limited = frozenset(i for i in may if chance.random() < 0.5)
        if not alike:
            for worker in chance.sample(self.workers, chance.randint(1, n)):
                for _ in range(chance.randint(1, 2)):
                    if len(worker.program) > 1:
                        i = chance.randrange(len(worker.program) - 1)
                        worker.program[i : i + 2] = reversed(worker.program[i : i + 2])

    def can_end(self, worker: Worker) -> bool:
        if worker.at - 1 in worker.limited:
            return True
        op = worker.program[worker.at - 1]
        if is_init(op):
            return (self.workers.index(worker), op) in self.decided
        return all(self.workers[i].reached[op] >= worker.reached[op] for i in self.stores[op[0]])

    def movable(self) -> list[Worker]:
        return [w for w in self.workers if (self.can_end(w) if w.waits else w.at < len(w.program))]

    def move(self) -> bool:
        """Let one of those that can go on do so. False: nobody can."""
        movable = self.movable()
        if movable:
            worker = self.chance.choice(movable)
            if not worker.waits:
                self.begin(worker, worker.program[worker.at])
                worker.at += 1
            worker.waits = not worker.waits
        return bool(movable)

    def begin(self, worker: Worker, op: Op) -> None:
        worker.reached[op] += 1
        if is_init(op):
            its = list(self.stores[op[0]])
            for verdict in self.agreements[op[0]].propose(its.index(self.workers.index(worker)), [(*op[1], 0)]):
                assert verdict.error is None
                self.decided.add((its[verdict.worker], (op[0], (verdict.topic, verdict.name))))

    def see(self, i: int) -> tuple[Blocked | None, Counter[Op]]:
        """What a worker answers now."""
        worker = self.workers[i]
        blocked = None
        op = worker.program[worker.at - 1] if worker.waits else None
        if op is not None and (i, op) not in self.decided:  # else a verdict has come, and it is about to go on
            free = worker.at - 1 in worker.limited
            blocked = Blocked(f"{i}/{worker.at}", f"worker {i}", [(op[0], (op[1], worker.reached[op]))], free)
        return blocked, Counter(worker.reached)

    def stuck(self) -> set[str]:
        """The waits that last when all have gone as far as they can."""
        while self.move():
            pass
        return {f"{i}/{worker.at}" for i, worker in enumerate(self.workers) if worker.waits}


class Asker:
    """What whoever asks has been answered. times: when each worker has given its last answer."""

    def __init__(self, model: Model) -> None:
        self.model, self.now = model, 0
        self.answers: dict[int, tuple[Blocked | None, Counter[Op]]] = {}
        self.times: dict[int, int] = {}
        self.first_seen: dict[str, int] = {}  # waits, by their ids
        self.ask(everybody=True)

    def ask(self, *, everybody: bool = False) -> None:
        for i in range(len(self.model.workers)):
            if everybody or self.model.chance.random() < 0.5:
                self.now += 1
                self.times[i], self.answers[i] = self.now, self.model.see(i)
                if (blocked := self.answers[i][0]) is not None:
                    self.first_seen.setdefault(blocked.id, self.now)
            while everybody is False and self.model.chance.random() < 0.1 and self.model.move():
                pass

    def facts(self) -> list[WaitFact]:
        waits = {i: blocked for i, (blocked, _) in self.answers.items() if blocked is not None}
        oldest = min(self.times.values())
        before = {one for one, time in self.first_seen.items() if time < oldest}

        def reached(i: int, store: str, item: Any) -> int:
            return self.answers[i][1][store, item] if i in self.model.stores[store] else -1

        return compare(waits, self.answers, reached, before)[0]


@pytest.mark.parametrize("alike", [True, False])
def test_a_circle_is_found_where_workers_wait_for_each_other_and_only_there(alike: bool) -> None:
    n_deadlocks = 0
    for seed in range(10_000 if grids.is_thorough() else 1000):
        model = Model(random.Random(seed), alike=alike)
        found: set[str] = set()
        asker = Asker(model)
        moves = True
        while moves:
            # Some answer now; the others' answers are old. Facts of some store may be older still.
            asker.ask()
            old = asker.facts()
            for _ in range(model.chance.randint(0, 3)):
                moves = model.move()
            asker.ask()
            facts = [*old, *asker.facts()]
            found |= set().union(*(waits for _, waits in deadlocks(facts)))
        stuck = model.stuck()
        asker.ask(everybody=True)
        asker.ask(everybody=True)
        last = asker.facts()
        now = set().union(*(waits for _, waits in deadlocks(last)))
        assert found <= stuck, seed
        # Who misses a worker that has ended waits for nobody who waits: no circle.
        if stuck and all(worker.waits for worker in model.workers):
            assert now == stuck, seed
        n_deadlocks += bool(now)
        assert not (alike and stuck)
    assert (n_deadlocks > 100) is not alike


def test_a_circle_begins_and_ends_with_the_same_wait() -> None:
    chain = [WaitFact(f"{i}", f"{i + 1}", f"text {i}") for i in range(2000)]
    assert circle(chain) == []
    # Two ways to one wait are no circle.
    assert circle([*chain, WaitFact("0", "5", "")]) == []
    found = circle([*chain, WaitFact("1500", "700", "text 1500")])
    assert len(found) == 801
    assert all(one.other == next_.wait for one, next_ in zip(found, [*found[1:], found[0]], strict=True))
