"""Random programs of rounds and barriers in several stores, against a model that knows which of them can go on.

Some wait for a while only, and then go on without what they have waited for.

Whoever asks sees each worker at another moment: no circle is found in what it has seen unless the workers in it can
never go on, and one is found as soon as nobody moves any more.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import grids
import pytest

from mpikv.observe.deadlock import Blocked, WaitFact, circle, compare, deadlocks

BARRIER = "barrier"
Op = tuple[str, int | str]  # a store, and a key of it or BARRIER


@dataclass
class Worker:
    """What it calls, one after the other; `at`: how many of these it has begun; each waits for all of its store."""

    program: list[Op]
    at: int = 0
    waits: bool = False
    limited: frozenset[int] = frozenset()  # which of these calls wait with a limit of their own
    reached: Counter[Op] = field(default_factory=Counter)


class Model:
    """Workers, and which of them are in which store."""

    def __init__(self, chance: random.Random, *, alike: bool) -> None:
        self.chance = chance
        n = chance.randint(2, 5)
        self.stores = {"a": range(n), "b": sorted(chance.sample(range(n), chance.randint(2, n)))}
        calls = [(store, chance.choice([0, 1, BARRIER])) for store in chance.choices("ab", k=chance.randint(1, 8))]
        self.workers = [Worker([op for op in calls if i in self.stores[op[0]]]) for i in range(n)]
        if chance.random() < 0.5:
            for worker in self.workers:
                worker.limited = frozenset(i for i in range(len(calls)) if chance.random() < 0.3)
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
        return all(self.workers[i].reached[op] >= worker.reached[op] for i in self.stores[op[0]])

    def movable(self) -> list[Worker]:
        return [w for w in self.workers if (self.can_end(w) if w.waits else w.at < len(w.program))]

    def move(self) -> bool:
        """Let one of those that can go on do so. False: nobody can."""
        movable = self.movable()
        if movable:
            worker = self.chance.choice(movable)
            if not worker.waits:
                worker.reached[worker.program[worker.at]] += 1
                worker.at += 1
            worker.waits = not worker.waits
        return bool(movable)

    def see(self, i: int) -> tuple[Blocked | None, Counter[Op]]:
        """What a worker answers now."""
        worker = self.workers[i]
        blocked = None
        if worker.waits:
            op = worker.program[worker.at - 1]
            free = worker.at - 1 in worker.limited
            blocked = Blocked(f"{i}/{worker.at}", f"worker {i}", [(op[0], (op[1], worker.reached[op]))], free)
        return blocked, Counter(worker.reached)

    def stuck(self) -> set[str]:
        """The waits that last when all have gone as far as they can."""
        while self.move():
            pass
        return {f"{i}/{worker.at}" for i, worker in enumerate(self.workers) if worker.waits}


def facts_of(model: Model, seen: dict[int, tuple[Blocked | None, Counter[Op]]]) -> list[WaitFact]:
    waits = {i: blocked for i, (blocked, _) in seen.items() if blocked is not None}

    def reached(i: int, store: str, item: int | str) -> int:
        return seen[i][1][store, item] if i in model.stores[store] else -1

    return compare(waits, seen, reached)[0]


@pytest.mark.parametrize("alike", [True, False])
def test_a_circle_is_found_where_workers_wait_for_each_other_and_only_there(alike: bool) -> None:
    n_deadlocks = 0
    for seed in range(10_000 if grids.is_thorough() else 1000):
        model = Model(random.Random(seed), alike=alike)
        found: set[str] = set()
        seen = {i: model.see(i) for i in range(len(model.workers))}
        moves = True
        while moves:
            # Some answer now; the others' answers are old. Facts of some store may be older still.
            for i in seen:
                if model.chance.random() < 0.5:
                    seen[i] = model.see(i)
            old = facts_of(model, seen)
            for _ in range(model.chance.randint(0, 3)):
                moves = model.move()
            seen = {i: model.see(i) if model.chance.random() < 0.5 else seen[i] for i in seen}
            facts = [*old, *facts_of(model, seen)]
            found |= set().union(*(waits for _, waits in deadlocks(facts)))
        stuck = model.stuck()
        last = facts_of(model, {i: model.see(i) for i in seen})
        now = set().union(*(waits for _, waits in deadlocks(last)))
        assert found <= stuck, seed
        # Who misses a worker that has ended waits for nobody who waits: no circle.
        if stuck and all(worker.waits for worker in model.workers):
            assert now == stuck, seed
        n_deadlocks += bool(now)
        assert not (alike and stuck)
    assert (n_deadlocks > 100) is not alike


def test_a_circle_begins_and_ends_with_the_same_wait() -> None:
    chain = [WaitFact(f"{i}", f"{i + 1}", f"text {i}", f"text {i + 1}") for i in range(2000)]
    assert circle(chain) == []
    # Two ways to one wait are no circle.
    assert circle([*chain, WaitFact("0", "5", "", "")]) == []
    found = circle([*chain, WaitFact("1500", "700", "text 1500", "text 700")])
    assert len(found) == 801
    assert all(one.other == next_.wait for one, next_ in zip(found, [*found[1:], found[0]], strict=True))
