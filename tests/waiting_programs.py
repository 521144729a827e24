"""Random programs that wait between their pushes, and that are right: no worker waits for one that waits for it.

A program is drawn, and played: where its workers would all wait for each other one of them does without. Nobody's
values depend on who is faster, so it must end whatever happens first. Each thread has stores and a process group of its
own; the threads of a worker run at the same time. Before a program ends all workers have pushed every key equally
often, in orders of their own, and collective calls stand in one order.

Values are whole numbers, so that they are exact however they are added.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.reductions import OF_GROUPS
from mpikv.groups.collective import allreduce

SHORT, LONG = 3, 40_000  # elements: 12 bytes share a message with others, 160 KB do not
ROUNDS = 3
FIRST = 5.0  # of every element: what `init` gives
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
    """The sum of a round, which every worker gets; 0: what `init` gave."""
    return value_of(key, sum(pushed(worker, key, round_) for worker in range(workers)) if round_ else FIRST)


def _drawn(chance: random.Random, keys: Sequence[Key], collectives: Sequence[str]) -> list[Call]:
    """One worker's calls, with waits anywhere; every key is pushed in each round."""
    pushes, rounds = chance.sample([*keys] * ROUNDS, len(keys) * ROUNDS), dict.fromkeys(keys, 0)
    kinds = ["push"] * len(pushes) + ["pull"] * chance.randint(0, 8) + ["collective"] * len(collectives)
    calls: list[Call] = []
    begun: list[Call] = []  # what ends the calls that are under way
    n_collectives = 0
    for which, kind in enumerate(chance.sample(kinds, len(kinds))):
        if kind == "collective":
            name, n_collectives = collectives[n_collectives], n_collectives + 1
            call = Call(name, (0, "long" if n_collectives % 2 else "short"), n_collectives, which)
        elif kind == "push":
            rounds[key := pushes.pop()] += 1
            call = Call(chance.choice(["push", "push", "pushpull", "pushpull begin"]), key, rounds[key], which)
        else:
            key = chance.choice(keys)
            call = Call(chance.choice(["pull", "pull begin"]), key, rounds[key], which)
        calls.append(call)
        if call.name.endswith("begin"):
            begun.append(call._replace(name="allreduce end" if kind == "collective" else "end"))
        while begun and (len(begun) > MOST_BEGUN or chance.random() < 0.3):
            calls.append(begun.pop(chance.randrange(len(begun))))
    return [*calls, *chance.sample(begun, len(begun))]


def _that_end(workers: list[list[Call]]) -> list[list[Call]]:
    """The programs, played: where all who are left would wait for each other, one of them does not wait.

    What a call waits for, that others have come to some call, stays true. So an order that ends shows that all do.
    """
    at, entered = [0] * len(workers), [-1] * len(workers)
    come: list[dict[Any, int]] = [defaultdict(int) for _ in workers]  # pushes of each key; None: collective calls

    def can_go_on(worker: int) -> bool:
        call = workers[worker][at[worker]]
        of = None if call.name.startswith(("barrier", "allreduce")) else call.key
        if entered[worker] < at[worker]:
            entered[worker] = at[worker]
            come[worker][of] += "push" in call.name or (of is None and call.name != "allreduce end")
        waits = call.name != "push" and not call.name.endswith("begin")
        return not waits or all(one[of] >= call.round for one in come)

    while left := [worker for worker, calls in enumerate(workers) if at[worker] < len(calls)]:
        if ready := [worker for worker in left if can_go_on(worker)]:
            for worker in ready:
                at[worker] += 1
            continue
        worker = next(
            worker
            for worker in left
            if not workers[worker][at[worker]].name.startswith(("barrier", "allreduce"))
            and not all(call.name.endswith("end") for call in workers[worker][at[worker] :])
        )
        call = workers[worker].pop(at[worker])
        if call.name == "pushpull":
            workers[worker].insert(at[worker], call._replace(name="push"))
        else:
            entered[worker] -= 1  # another call is here now
        if call.name == "end":
            workers[worker].append(call)
    return workers


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
        kinds = [f"barrier {chance.choice(some)}", *(["allreduce", "allreduce begin"] if groups else [])]
        collectives = chance.choices(kinds, k=chance.randint(0, 3))
        played = _that_end([_drawn(chance, own, collectives) for _ in range(workers)])
        most = chance.choice([0, 2])
        calls.append([[call._replace(priority=chance.randint(-most, most)) for call in some] for some in played])
    used = sorted({call.key for thread in calls for some in thread for call in some if "push" in call.name})
    return Program(workers, of_thread, used, calls)


def prepare(program: Program, stores: Sequence[Any]) -> None:
    """Make the keys, in one worker's stores. Collective."""
    for key in program.keys:
        stores[key[0]].init(key[1], value_of(key, FIRST))


def run(program: Program, worker: int, thread: int, stores: Sequence[Any], group: Any) -> None:
    """Make the calls of a thread of a worker. group: its process group, None where the program has none."""
    begun: dict[int, tuple[Any, np.ndarray]] = {}

    def check(call: Call, found: np.ndarray) -> None:
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
            request = group.start(allreduce([value], OF_GROUPS["sum"]))
            if call.name == "allreduce":
                request.wait()
                check(call, value)
            else:
                begun[call.which] = request, value
