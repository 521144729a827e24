"""A model of workers that go on without those that died: every order of events of a few workers and deaths.

The model has one key. A worker opens rounds and completes them; what completes a round may have come to one worker and
be under way to another. Who notices a death asks for a new generation, which begins when all survivors have come. They
report, and each by itself takes what a giver has; who dies meanwhile, also the giver, begins another generation. The
workers' rounds, and who gives what, are those of the library (placement/recovery.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mpikv.placement.recovery import EARLY, Report, Rounds, givers

LAST = 2  # rounds that a worker makes


@dataclass
class Worker:
    rounds: Rounds = field(default_factory=Rounds)
    results: tuple[frozenset[int], ...] = ()  # of each round that is complete, who contributed to it
    generation: int = 0
    alive: bool = True
    wants_next: bool = False  # it has noticed a death
    lacks: int | None = None  # whom it waits for: the giver of a result

    def state(self) -> tuple[Any, ...]:
        rounds = (self.rounds.done, self.rounds.is_open)
        return (*rounds, self.results, self.generation, self.alive, self.wants_next, self.lacks)


@dataclass
class Model:
    workers: list[Worker]
    deaths: int
    members: frozenset[int]
    generation: int = 0
    opened: dict[int, frozenset[int]] = field(default_factory=dict)  # of each round, in this generation: by whom

    def state(self) -> tuple[Any, ...]:
        workers = tuple(worker.state() for worker in self.workers)
        return workers, self.deaths, self.members, tuple(sorted(self.opened.items()))

    def living(self) -> frozenset[int]:
        return frozenset(i for i, worker in enumerate(self.workers) if worker.alive)

    def events(self) -> Iterator[tuple[str, int]]:
        """What may happen next."""
        living = self.living()
        for i in living:
            worker = self.workers[i]
            if self.deaths and len(living) > 1:
                yield "dies", i
            if worker.wants_next or worker.generation != self.generation:
                continue
            if worker.lacks is not None:
                yield ("takes", i) if worker.lacks in living else ("notices", i)
                continue
            if living != self.members:
                yield "notices", i
            if not worker.rounds.is_open and worker.rounds.done < LAST:
                yield "opens", i
            # All had opened it before anybody died: what they brought may have come here whole.
            elif worker.rounds.is_open and self.opened.get(worker.rounds.done + 1) == self.members:
                yield "completes", i
        if all(self.workers[i].wants_next for i in living):
            yield "begins", self.generation + 1

    def after(self, event: str, which: int) -> Model:
        workers = [replace(worker, rounds=copy.copy(worker.rounds)) for worker in self.workers]
        model = replace(self, workers=workers, opened=dict(self.opened))
        worker = model.workers[which] if event != "begins" else model.workers[0]
        if event == "dies":
            worker.alive, model.deaths = False, model.deaths - 1
        elif event == "notices":
            worker.wants_next, worker.lacks = True, None
        elif event == "opens":
            model._open(which, worker.rounds.begin())
        elif event == "completes":
            worker.results = (*worker.results, model.members)
            worker.rounds.complete()
        elif event == "begins":
            model._begin(which)
        else:
            giver = model.workers[worker.lacks]  # type: ignore[index]
            worker.lacks, worker.results = None, giver.results[: giver.rounds.done]
            assert worker.rounds.catch_up(giver.rounds.done) or worker.rounds.done == 0
            model._open_again(which)
        return model

    def _open(self, which: int, number: int) -> None:
        self.opened[number] = self.opened.get(number, frozenset()) | {which}

    def _open_again(self, which: int) -> None:
        if self.workers[which].rounds.is_open:
            self._open(which, self.workers[which].rounds.done + 1)

    def _begin(self, generation: int) -> None:
        self.generation, self.members, self.opened = generation, self.living(), {}
        chosen = sorted(self.members)
        giver = givers([Report({"key": self.workers[i].rounds.done}) for i in chosen]).get("key")
        for i in chosen:
            worker = self.workers[i]
            worker.generation, worker.wants_next, worker.lacks = generation, False, None
            if giver is not None and worker.rounds.done < self.workers[chosen[giver]].rounds.done:
                worker.lacks = chosen[giver]
            else:
                self._open_again(i)

    def check(self) -> None:
        """What holds after every event, of those that live."""
        living = [worker for worker in self.workers if worker.alive]
        for worker in living:
            assert len(worker.results) == worker.rounds.done
            assert all(worker.results[r] == other.results[r] for other in living
                       for r in range(min(worker.rounds.done, other.rounds.done)))  # fmt: skip
            assert all(self.living() <= result for result in worker.results)


@pytest.mark.parametrize(("n_workers", "deaths"), [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2)])
def test_every_order_of_events_ends_with_all_rounds(n_workers: int, deaths: int) -> None:
    begin = Model([Worker() for _ in range(n_workers)], deaths, frozenset(range(n_workers)))
    seen, left, ends = {begin.state()}, [begin], 0
    while left:
        model = left.pop()
        model.check()
        events = [event for event in model.events() if event[0] != "dies"]
        if not events:
            ends += 1
            assert all(worker.rounds.done == LAST for worker in model.workers if worker.alive), model
        for event in model.events():
            after = model.after(*event)
            if after.state() not in seen:
                seen.add(after.state())
                left.append(after)
    assert ends > deaths
    print(len(seen), "states")


def test_a_key_without_a_value_is_given_by_the_first_that_has_come_to_it() -> None:
    """Where some have its value, by one of them; where nobody knows it, by nobody."""
    reports = [
        Report({"new": EARLY}),
        Report({"new": EARLY, "old": EARLY}),
        Report({"new": EARLY, "old": 0}),
        Report({}),
    ]
    assert givers(reports) == {"new": 0, "old": 2}
    assert givers(reports[:1]) == {"new": 0}
    assert givers(reports[3:]) == {}
