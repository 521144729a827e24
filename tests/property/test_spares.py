"""Random programs whose ranks die at random, and spares that take the places of workers: all have the same values.

All workers make the same steps. Each brings a power of two of its own, so that a sum tells who was in it: everybody who
is there later, and a spare from the step on in which it has taken a place.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any, NamedTuple

import numpy as np
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from store_modes import Mode

from mpikv import optimizers
from mpikv.placement.spares import Seat, after, at_start
from mpikv.transports.faulty import Deaths, Faults

MODES = (
    *(Mode("dist_sync", 6), Mode("dist_sync", 5, memory="off"), Mode("dist_sync", 6, hosts="aabbcc")),
    *(
        Mode("dist_sync", 5, 0, "owners", memory="off"),
        Mode("dist_sync", 5, 1),
        Mode("dist_sync", 5, 2, hosts="aabbccc"),
    ),
)
STEPS, SIZES = 12, (1, 7, 3000)
KINDS = "pushpull", "push", "async", "pull", "barrier", "init"


class Job(NamedTuple):
    """dying: ranks, before which step, and in how many calls of their transports. momentum: whether owners update."""

    mode: Mode
    spares: int
    program: list[tuple[str, int]]
    dying: list[tuple[int, int, int]]
    momentum: bool
    progress: str


@st.composite
def jobs(draw: Any) -> Job:
    mode = draw(st.sampled_from(MODES))
    kinds = [("init", 0), *draw(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), max_size=8))]
    program = [*kinds, *[("pushpull", 0)] * (STEPS - len(kinds))]
    spares = draw(st.integers(1, 2))
    ranks = draw(st.permutations(range(mode.workers + mode.servers)))[: mode.workers - spares - 1]  # one is left
    dying = [(rank, draw(st.integers(0, STEPS - 4)), draw(st.integers(1, 40))) for rank in ranks]
    return Job(mode, spares, program, dying, draw(st.booleans()), draw(st.sampled_from(["thread", "thread", "calls"])))


class Worker:
    """seen: what this worker has pulled, by the step and the key. began: the step with which it has."""

    def __init__(self, store: Any, program: list[tuple[str, int]], *, momentum: bool) -> None:
        self.store, self.program, self.at, self.began, self.n_keys = store, program, 0, 0, 0
        self.seen: dict[tuple[int, int], float] = {}
        if momentum:
            store.set_optimizer(optimizers.SGD(learning_rate=1.0, momentum=0.5))
        if store.session.alone:
            store.session.take_place(self.give, self.take)

    def give(self) -> bytes:
        return str(self.at).encode()

    def take(self, data: bytes) -> None:
        self.at = self.began = int(data)
        for kind, _ in self.program[: self.at]:
            if kind == "init":
                self.init()

    def init(self) -> None:
        self.store.init(self.n_keys, np.full(SIZES[self.n_keys % 3], self.store.session.number + 0.0))
        self.n_keys += 1

    def see(self, key: int, value: Any) -> None:
        assert (value == value[0]).all()
        self.seen[self.at, key] = float(value[0])

    def run(self) -> None:
        kind, which = self.program[self.at]
        key, store = which % max(self.n_keys, 1), self.store
        mine = np.full(SIZES[key % 3], 2.0**store.session.number)
        if kind == "init":
            self.init()
        elif kind == "pushpull":
            store.pushpull(key, mine)
            self.see(key, mine)
        elif kind == "push":
            store.push(key, mine)
        elif kind == "pull":
            self.see(key, store.pull(key))
        elif kind == "async":
            request = store.pushpull_async(key, mine, out=mine)
            time.sleep(random.Random(self.at).choice([0, 0.001]))
            request.wait()
            self.see(key, mine)
        else:
            store.barrier()
        self.at += 1
        store.session.between_steps(self.give, self.take)


@settings(max_examples=examples(100))
@given(jobs())
def test_spares_have_what_the_others_have(job: Job) -> None:
    deaths, lock, armed = Deaths(), threading.Lock(), set[int]()

    def body(store: Any) -> tuple[int, int, dict[tuple[int, int], float]]:
        worker = Worker(store, job.program, momentum=job.momentum)
        while worker.at < len(job.program):
            with lock:
                for rank, at, calls in job.dying:
                    if at == worker.at and rank not in armed:
                        armed.add(rank)
                        deaths.die_in(rank, calls=calls)
            worker.run()
            time.sleep(0.002)  # in which a spare may come
        return store.session.number, worker.began, worker.seen

    found = job.mode.run_continued(body, deaths, lambda _: Faults(), progress=job.progress, spares=job.spares)
    results = [one for one in found if one is not None]
    assert results
    _, _, seen = min(results, key=lambda one: one[1])
    assert len({number for number, *_ in results}) == len(results)
    for number, begins, values in results:
        assert values == {place: value for place, value in seen.items() if place[0] >= begins}
        if not job.momentum:
            sums = [int(value) for (at, _), value in values.items() if job.program[at][0] in ("pushpull", "async")]
            assert all(total >> number & 1 for total in sums)


def test_who_takes_a_place() -> None:
    seats = at_start({0: Seat(), 1: Seat(serves=True), 2: Seat(), 3: Seat(), 4: Seat()}, 0, 2)
    assert [rank for rank, seat in seats.items() if seat.spare] == [3, 4]
    numbered = {0: Seat(number=0, of=2), 1: seats[1], 2: Seat(number=1, of=2), 3: seats[3], 4: seats[4]}
    assert after(numbered)[3] == Seat(spare=True, of=2), "no place is free"
    coming = after({rank: seat for rank, seat in numbered.items() if rank != 0})
    assert [coming[rank].number for rank in (1, 2, 3, 4)] == [-1, 1, 0, -1]
    ready = {**coming, 3: coming[3]._replace(ready=True)}
    assert after(ready)[3].spare, "nobody has let it in"
    assert after({**ready, 2: ready[2]._replace(admits=True)})[3] == Seat(number=0, of=2)
    assert after({rank: seat for rank, seat in ready.items() if rank != 3})[4].number == 0, "the other one, if it dies"
    assert after({2: Seat(number=1, of=2), 0: Seat()})[0].number == 0, "a worker that had not learned its number"
