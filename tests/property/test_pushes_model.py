"""All orders of events of an asynchronous store with three ranks, each a worker and an owner, and up to two deaths.

What is exchanged are messages that may come at any time, in the order of their sender; the rules are the store's own:
which owner's values survivors begin with (`chosen`), whether a push is in them (`KeptPush.is_in`), what an owner has
kept, and when it forgets (`Kept`). In every order each push of a survivor ends in the value once, and one of the dead
at most once; but where both owners of the last generation are dead of which a survivor knows that it counts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mpikv.placement.keys import KeyInfo
from mpikv.server.kept import Held, Kept
from mpikv.strategies.continued_pushes import chosen
from mpikv.strategies.kept_pushes import KeptPush

INFO = KeyInfo("w", 0, (1,), np.dtype("f4"))


@dataclass
class Core:
    """An owner's value: by the number of a worker, how often its push is in it."""

    value: dict[int, int]
    seen: list[int]
    answers: bool

    def held(self) -> list[Held]:
        return [Held("w", self.seen, self.answers, lambda: {"value": self.value})]


@dataclass
class Rank:
    """kept: of its owner. ranks: its own in each generation. waits: for others to come to the next generation. told:
    whether it knows that this one counts.
    """

    number: int
    kept: Kept = field(default_factory=Kept)
    ranks: dict[int, int] = field(default_factory=dict)
    cores: dict[int, Core] = field(default_factory=dict)
    push: KeptPush | None = None
    acked: int = 0
    last: int = 0
    alive: bool = True
    waits: bool = False
    told: bool = True


@dataclass
class Model:
    """members: of the present generation, whose first two are the owners. messages: of it, which are under way: from,
    to, and what.
    """

    ranks: list[Rank]
    pushers: tuple[int, ...]
    deaths: int
    generation: int = 0
    members: list[int] = field(default_factory=list)
    messages: list[tuple[int, int, str]] = field(default_factory=list)
    all_owners: list[list[int]] = field(default_factory=list)  # by generation
    lost: bool = False

    def state(self) -> str:
        ranks = [
            (
                *(rank.kept._counts, rank.ranks, rank.cores, rank.acked, rank.last, rank.alive, rank.waits, rank.told),
                *((rank.push.sent, rank.push.found, rank.push.done) if rank.push is not None else ()),
            )
            for rank in self.ranks
        ]
        return repr((ranks, self.deaths, self.generation, self.members, self.messages))

    @property
    def owners(self) -> list[int]:
        return self.members[:2]

    def events(self) -> Iterator[tuple[Any, ...]]:
        """What may happen next."""
        living = [rank for rank in self.ranks if rank.alive]
        for rank in living:
            if self.deaths and len(living) > 1:
                yield "dies", rank.number
            if rank.waits:
                continue
            if any(not self.ranks[one].alive for one in self.members):
                yield "comes", rank.number
            if not rank.told and (rank.number == self.members[0] or self.ranks[self.members[0]].told):
                yield "is told", rank.number
            if rank.told and rank.push is None and rank.number in self.pushers:
                yield "pushes", rank.number
        for i, (sender, to, _) in enumerate(self.messages):
            first = not any(message[:2] == (sender, to) for message in self.messages[:i])
            if first and self.ranks[to].alive and not self.ranks[to].waits:
                yield "arrives", i
        if all(rank.waits for rank in living):
            yield ("begins",)

    def after(self, event: tuple[Any, ...]) -> Model:
        model = copy.deepcopy(self)
        name, *which = event
        getattr(model, name.replace(" ", "_"))(*which)
        return model

    def dies(self, number: int) -> None:
        """What it has sent may come all the same; or only to one of the owners."""
        self.ranks[number].alive = False
        self.deaths -= 1

    def comes(self, number: int) -> None:
        self.ranks[number].waits = True

    def pushes(self, number: int) -> None:
        rank = self.ranks[number]
        rank.push = KeptPush(INFO, None, None, ())
        self.send(rank)

    def send(self, rank: Rank) -> None:
        assert rank.push is not None
        rank.push.sent, rank.acked = (self.generation, 1), 0
        self.messages += [(rank.number, owner, "push") for owner in self.owners]

    def arrives(self, i: int) -> None:
        sender, to, what = self.messages.pop(i)
        rank = self.ranks[to]
        if what == "push":
            core = rank.cores[self.generation]
            core.value[sender] = core.value.get(sender, 0) + 1
            core.seen[self.members.index(sender)] += 1
            self.messages.append((to, sender, "ack"))
        elif what == "ack":
            assert rank.push is not None
            rank.acked += 1
            rank.push.done |= rank.acked == len(self.owners)
        else:
            rank.kept.answer(asking(self.generation, []))

    def is_told(self, number: int) -> None:
        """It knows that all have begun. Worker 0 lets owners forget earlier generations, before all else."""
        rank = self.ranks[number]
        rank.told, rank.last = True, self.generation
        if number == self.members[0]:
            self.messages += [(number, owner, "forget") for owner in self.members]
        if rank.push is not None and not rank.push.done:
            if rank.push.found == (self.generation, True):
                rank.push.done = True
            else:
                self.send(rank)

    def begins(self) -> None:
        """All that live come together, and all their owners begin."""
        self.generation += 1
        self.members = [rank.number for rank in self.ranks if rank.alive]
        self.all_owners, self.messages = [*self.all_owners, self.owners], []
        known = max(self.ranks[one].last for one in self.members)
        answers = [json.loads(self.ranks[one].kept.answer(asking(known, None))) for one in self.members]
        last = max(counts for counts, _ in answers)
        left = chosen([dict(of_owner).get(last, []) for _, of_owner in answers])
        if "w" not in left:
            self.lost = True
            return
        owner, seen = left["w"]
        value = self.ranks[self.members[owner]].cores[last].value
        for i, one in enumerate(self.members):
            rank = self.ranks[one]
            rank.waits = rank.told = False
            rank.ranks[self.generation] = i
            if rank.push is not None and not rank.push.done:
                rank.push.found = self.generation, rank.push.is_in(last, seen[rank.ranks[last]])
            if one in self.owners:
                self.own(rank, dict(value))

    def own(self, rank: Rank, value: dict[int, int]) -> None:
        core = Core(value, [0] * len(self.members), rank.number == self.owners[0])
        rank.kept.number, rank.cores[self.generation] = self.generation, core
        rank.kept.begin(core)  # type: ignore[arg-type]

    def check(self) -> None:
        """At the end of all events."""
        first = self.ranks[self.owners[0]].cores[self.generation].value
        for rank in self.ranks:
            wanted = (1,) if rank.alive and rank.number in self.pushers else (0, 1)
            for owner in self.owners:
                value = self.ranks[owner].cores[self.generation].value
                assert value.get(rank.number, 0) in wanted, (self.state(), value)
            assert not rank.alive or rank.push is None or rank.push.done
        assert all(self.ranks[owner].cores[self.generation].value == first for owner in self.owners)


def asking(number: int, keys: list[str] | None) -> Any:
    return np.frombuffer(json.dumps([number, keys]).encode(), np.uint8)


def begun(n_ranks: int, pushers: tuple[int, ...], deaths: int) -> Model:
    model = Model([Rank(number) for number in range(n_ranks)], pushers, deaths, members=[*range(n_ranks)])
    model.all_owners = [model.owners]
    for i, rank in enumerate(model.ranks):
        rank.ranks[0] = i
        if i in model.owners:
            model.own(rank, {})
    return model


@pytest.mark.parametrize(
    ("n_ranks", "pushers", "deaths"),
    [
        *((2, (0, 1), 1), (3, (0,), 2), (3, (1,), 2), (3, (2,), 2)),
        *(pytest.param(n, who, 3 - len(who), marks=pytest.mark.full) for n, who in ((3, (1, 2)), (4, (1,)))),
    ],
)
def test_each_push_of_a_survivor_is_in_the_value_once(n_ranks: int, pushers: tuple[int, ...], deaths: int) -> None:
    open_, known, ends, lost = [begun(n_ranks, pushers, deaths)], set[str](), 0, 0
    while open_:
        model = open_.pop()
        if (state := model.state()) in known:
            continue
        known.add(state)
        if model.lost:
            lost += 1
            counts = max(max(rank.last, rank.kept._counts) for rank in model.ranks if rank.alive)
            assert not any(model.ranks[one].alive for one in model.all_owners[counts]), model.state()
            continue
        events = [*model.events()]
        if not events or {name for name, *_ in events} == {"dies"}:
            model.check()
            ends += 1
        open_ += [model.after(event) for event in events]
    assert ends
    assert (lost > 0) is (deaths == 2)
