"""Random programs that wait between their pushes, and that are right: no worker waits for one that waits for it.

A program is made by playing it: one thread of one worker after another makes its next call. A call that has to wait for
others is only made where they can still come. So the order in which the calls were made shows that the program can end;
and since nobody's values depend on who is faster, it must end whatever happens first. Each thread has stores and a
process group of its own; the threads of a worker run at the same time. Before a program ends all workers have pushed
every key equally often, in orders of their own, and collective calls stand in one order.

Values are whole numbers, so that they are exact however they are added. What each round of a key gives says the
reference store.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpikv.groups.collective import allreduce
from mpikv.groups.operators import OPERATORS
from mpikv.testing.reference import ReferenceStore

SHORT, LONG = 3, 40_000  # elements: 12 bytes share a message with others, 160 KB do not
ROUNDS = 3
MOST_BEGUN = 3  # calls that a thread has begun and not waited for
Key = tuple[int, str]  # the store's number, and the key


class Call(NamedTuple):
    """One call of one thread.

    name: `pushpull begin` and `pull begin` are the calls with `_async`, `end` waits for one of them, the `which`-th.
    round: what a push begins, and what a pull gives. priority: of a push.
    """

    name: str
    key: Key = (0, "")
    round: int = 0
    which: int = -1
    priority: int = 0


def size_of(key: Key) -> int:
    return LONG if key[1].startswith("long") else SHORT


def value_of(key: Key, number: float) -> np.ndarray:
    """Elements that differ, so that none can be at another's place."""
    return (1 + np.arange(size_of(key)) % 13).astype(np.float32) * np.float32(number)


def pushed(worker: int, key: Key, round_: int) -> float:
    return float((worker + 1) * 10 + round_ + 100 * key[0] + len(key[1]))


def expected(workers: int, key: Key, round_: int) -> np.ndarray:
    """What every worker gets from a round; 0: what `init` gave."""
    store = ReferenceStore(workers)
    store.init(key, np.full(1, 5.0))
    for one in range(1, round_ + 1):
        for worker in range(workers):
            store.push(worker, key, [np.full(1, pushed(worker, key, one))])
    return value_of(key, store.pull(0, key)[0])


@dataclass
class _Player:
    """One worker's calls in one thread. begun: of its `_async` calls that it has not waited for, what ends them."""

    calls: list[Call] = field(default_factory=list)
    pushes: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    begun: dict[int, tuple[str, Key, int]] = field(default_factory=dict)
    n_begun: int = 0
    collectives: int = 0  # made or begun
    waits_for: tuple[Key | None, int] | None = None  # a round of a key; without a key: a collective call


class _Game:
    """All workers' calls in one thread of each."""

    def __init__(self, chance: random.Random, workers: int, keys: Sequence[Key], *, group: bool) -> None:
        self.chance, self.keys = chance, list(keys)
        self.players = [_Player() for _ in range(workers)]
        stores = sorted({store for store, _ in keys})
        kinds = [f"barrier {chance.choice(stores)}", *(["allreduce", "allreduce begin"] if group else [])]
        self.collectives = chance.choices(kinds, k=chance.randint(0, 3))

    def missing(self, waits_for: tuple[Key | None, int]) -> list[_Player]:
        key, count = waits_for
        return [one for one in self.players if (one.collectives if key is None else one.pushes[key]) < count]

    def can_end(self, player: _Player, waits_for: tuple[Key | None, int]) -> bool:
        """Whether those who are missing do not wait, directly or through others, for this worker."""
        seen: list[_Player] = []
        to_see = self.missing(waits_for)
        while to_see:
            one = to_see.pop()
            if one is player:
                return False
            if one not in seen and one.waits_for is not None:
                to_see += self.missing(one.waits_for)
            seen.append(one)
        return True

    def wait(self, player: _Player, waits_for: tuple[Key | None, int]) -> None:
        if self.missing(waits_for):
            player.waits_for = waits_for

    def play(self) -> list[list[Call]]:
        while True:
            free = [one for one in self.players if one.waits_for is None and not self.has_ended(one)]
            if not free:
                break
            self.move(self.chance.choice(free))
            for one in self.players:
                if one.waits_for is not None and not self.missing(one.waits_for):
                    one.waits_for = None
        assert all(one.waits_for is None for one in self.players), "a program that cannot end"
        return [one.calls for one in self.players]

    def has_ended(self, player: _Player) -> bool:
        rounds = all(player.pushes[key] == ROUNDS for key in self.keys)
        return rounds and not player.begun and player.collectives == len(self.collectives)

    def move(self, player: _Player) -> None:
        """Make one call, if it is one that may be made now."""
        chance = self.chance
        kind = chance.choice(["push", "push", "pushpull", "begin", "pull", "pull begin", "end", "collective"])
        key = chance.choice(self.keys)
        round_ = player.pushes[key]
        if (kind in ("push", "pushpull", "begin") and round_ == ROUNDS) or (
            kind in ("begin", "pull begin") and len(player.begun) >= MOST_BEGUN
        ):
            return
        if kind == "push":
            player.pushes[key] += 1
            player.calls.append(Call("push", key, round_ + 1))
        elif kind == "pushpull":
            player.pushes[key] += 1
            if self.can_end(player, (key, round_ + 1)):
                player.calls.append(Call("pushpull", key, round_ + 1))
                self.wait(player, (key, round_ + 1))
            else:
                player.calls.append(Call("push", key, round_ + 1))
        elif kind in ("begin", "pull begin"):
            pushes = kind == "begin"
            player.pushes[key] += pushes
            player.begun[player.n_begun] = "end", key, round_ + pushes
            player.calls.append(
                Call("pushpull begin" if pushes else "pull begin", key, round_ + pushes, player.n_begun)
            )
            player.n_begun += 1
        elif kind == "pull" and self.can_end(player, (key, round_)):
            player.calls.append(Call("pull", key, round_))
            self.wait(player, (key, round_))
        elif kind == "end" and player.begun:
            which = chance.choice(list(player.begun))
            name, key, round_ = player.begun[which]
            waits_for = (None, round_) if name == "allreduce end" else (key, round_)
            if self.can_end(player, waits_for):
                del player.begun[which]
                player.calls.append(Call(name, key, round_, which))
                self.wait(player, waits_for)
        elif kind == "collective" and player.collectives < len(self.collectives):
            self.collective(player)

    def collective(self, player: _Player) -> None:
        name = self.collectives[player.collectives]
        number = player.collectives + 1
        if name == "allreduce begin":
            player.begun[player.n_begun] = "allreduce end", (0, "long" if number % 2 else "short"), number
            player.calls.append(Call(name, player.begun[player.n_begun][1], number, player.n_begun))
            player.n_begun += 1
            player.collectives += 1
        else:
            player.collectives += 1
            if not self.can_end(player, (None, number)):
                player.collectives -= 1
                return
            player.calls.append(Call(name, (0, "long" if number % 2 else "short"), number))
            self.wait(player, (None, number))


@dataclass(frozen=True)
class Program:
    """stores: for each thread the numbers of its stores. calls: for each thread those of each worker."""

    workers: int
    stores: list[list[int]]
    keys: list[Key]
    calls: list[list[list[Call]]]


def program(seed: int, workers: int, stores: Sequence[int], *, groups: bool) -> Program:
    """A random one. stores: how many each thread has. groups: whether each thread has a process group, too."""
    chance = random.Random(seed)
    numbers = iter(range(sum(stores)))
    of_thread = [[next(numbers) for _ in range(n)] for n in stores]
    keys = [(store, name) for some in of_thread for store in some for name in ("long a", "long b", "short", "short b")]
    calls = []
    for some in of_thread:
        own = [key for key in keys if key[0] in some]
        own = chance.sample(own, chance.randint(2, len(own)))
        played = _Game(chance, workers, own, group=groups).play()
        most = chance.choice([0, 2])
        calls.append([[call._replace(priority=chance.randint(-most, most)) for call in some] for some in played])
    used = sorted({call.key for thread in calls for some in thread for call in some if "push" in call.name})
    return Program(workers, of_thread, used, calls)


def prepare(program: Program, stores: Sequence[Any]) -> None:
    """Make the keys, in one worker's stores. Collective."""
    for key in program.keys:
        stores[key[0]].init(key[1], value_of(key, 5.0))


def run(program: Program, worker: int, thread: int, stores: Sequence[Any], group: Any) -> None:
    """Make the calls of a thread of a worker. group: its process group, None where the program has none."""
    begun: dict[int, tuple[Any, np.ndarray]] = {}

    def check(call: Call, found: np.ndarray) -> None:
        if call.name.startswith("allreduce"):
            total = sum(pushed(one, call.key, call.round) for one in range(program.workers))
            wanted = value_of(call.key, total)
        else:
            wanted = expected(program.workers, call.key, call.round)
        assert np.array_equal(found, wanted), f"worker {worker}: {call}: {found[:4]}..., not {wanted[:4]}..."

    def mine(call: Call) -> np.ndarray:
        return value_of(call.key, pushed(worker, call.key, call.round))

    for call in program.calls[thread][worker]:
        store, name = stores[call.key[0]], call.key[1]
        if call.name == "push":
            store.push(name, mine(call), priority=call.priority)
        elif call.name == "pushpull":
            store.pushpull(name, value := mine(call), priority=call.priority)
            check(call, value)
        elif call.name == "pull":
            check(call, store.pull(name))
        elif call.name == "pushpull begin":
            value = mine(call)
            begun[call.which] = store.pushpull_async(name, value, priority=call.priority), value
        elif call.name == "pull begin":
            value = np.empty(size_of(call.key), np.float32)
            begun[call.which] = store.pull_async(name, value), value
        elif call.name.startswith("barrier"):
            stores[int(call.name.split()[1])].barrier()
        elif call.name in ("end", "allreduce end"):
            request, value = begun.pop(call.which)
            request.wait()
            check(call, value)
        else:
            value = mine(call)
            request = group.start(allreduce([value], OPERATORS["sum"]))
            if call.name == "allreduce":
                request.wait()
                check(call, value)
            else:
                begun[call.which] = request, value
