"""Stopping together under random interleavings: nobody waits for ever, and either all stop or none.

Messages travel in order between two workers, and not otherwise. A synchronous worker's step ends when every worker has
begun it; asynchronous ones meet in barriers at some steps. Workers act whenever a message comes, also while they wait,
as the progress engine does.
"""

from __future__ import annotations

import re
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv.session.agreeing import Agreeing
from mpikv.session.agreement import Agreement, Proposal
from mpikv.session.rules import RULES
from mpikv.session.stop import Stopping


class Worker:
    """A program: in each step it works, meets the others where it must, and reads; `at` says where it is."""

    def __init__(self, world: World, number: int, steps: int) -> None:
        self.number, self.steps = number, steps
        self.messages: Any = SimpleNamespace(
            acts={},
            names=[f"worker {i}" for i in range(world.size)],
            leads=number == 0,
            workers=SimpleNamespace(rank=number, size=world.size),
            engine=SimpleNamespace(lock=nullcontext()),
            send_to=lambda to, message: world.send(number, to, message),
        )
        waits: Any = SimpleNamespace(left=lambda worker, pushes: None)
        self.agreeing = Agreeing(
            self.messages,
            waits,
            agreement=lambda names: Agreement(names, RULES, lambda *_: None),
            on_verdict=lambda verdict: None,
        )
        self.stopping = Stopping(self.messages, waits, self.agreeing, common_steps=world.common)
        self.step = 0  # that it is in, from 1 on
        self.at = "work"  # work, meeting, reading, closing, closed
        self.call: Proposal | None = None  # that it waits for
        self.said: list[bool] = []

    def agree(self, topic: str, name: int, payload: Any) -> bool:
        """Whether a call that all make has ended."""
        if self.call is None:
            self.call = self.agreeing.propose([(topic, name, payload)])
        if not self.call.test():
            return False
        self.call.verdicts[topic, name].unwrap()
        self.call = None
        return True


class World:
    """All workers, and the messages between them. meets: asynchronous ones wait for all in every so many steps."""

    def __init__(self, steps: list[int], meets: int, *, common: bool) -> None:
        self.size, self.common, self.meets = len(steps), common, meets
        self.on_the_way: dict[tuple[int, int], deque[Any]] = {}
        self.sent = 0
        self.workers = [Worker(self, i, n) for i, n in enumerate(steps)]

    def send(self, sender: int, to: int, message: Any) -> None:
        if to == sender:
            self.workers[to].messages.acts[message["kind"]](to, {"worker": to, **message})
            return
        self.sent += message["kind"] == "wish" or not {"close", "barrier"} & {*re.findall(r"\w+", str(message))}
        self.on_the_way.setdefault((sender, to), deque()).append({"worker": sender, **message})

    def deliver(self, ends: tuple[int, int]) -> None:
        message, worker = self.on_the_way[ends].popleft(), self.workers[ends[1]]
        # A worker that has not heard yet that all close may wish; nothing else comes to who has closed.
        assert worker.at != "closed" or (message["kind"] == "wish" and ends[1] == 0)
        worker.messages.acts[message["kind"]](ends[0], message)

    def move(self, worker: Worker) -> bool:
        """Let a worker go on. Whether it could."""
        if worker.at == "work":
            worker.step += 1
            meets = self.common or (self.meets and worker.step % self.meets == 0)
            worker.at = "meeting" if meets else "reading"
        elif worker.at == "meeting":
            if self.common:
                met = all(other.step >= worker.step for other in self.workers)
            else:
                met = worker.agree("barrier", worker.step, None)
            worker.at = "reading" if met else "meeting"
            return met
        elif worker.at == "reading":
            if (said := worker.stopping.read()) is None:
                return False
            worker.said.append(said)
            worker.at = "closing" if said or worker.step == worker.steps else "work"
        elif worker.at == "closing":
            closed = worker.agree("close", 1, [[], {}])
            worker.at = "closed" if closed else "closing"
            return closed
        return worker.at != "closed"


def play(world: World, data: st.DataObject, wishes: list[tuple[int, int]]) -> None:
    """Move on at random until all have closed. A wish comes after so many moves, at such a worker."""
    after = sorted(wishes)
    in_vain = 0
    for turn in range(8000):
        while after and after[0][0] <= turn:
            world.workers[after.pop(0)[1] % world.size].stopping.wish("test")
        boxes = [ends for ends, box in world.on_the_way.items() if box]
        workers = [worker for worker in world.workers if worker.at != "closed"]
        if not workers and not after:
            return
        moves = [*workers, *boxes]
        # Half of the turns are fair, so that every play ends.
        i = data.draw(st.integers(0, len(moves) - 1)) if turn % 2 and moves else turn // 2 % max(1, len(moves))
        if moves:
            moved = world.deliver(moves[i]) or True if isinstance(moves[i], tuple) else world.move(moves[i])
            in_vain = 0 if moved or after else in_vain + 1
        assert in_vain < 20 * (world.size + 1), [(worker.step, worker.at, worker.said) for worker in world.workers]
    raise AssertionError("no end")


WISHES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=5)


@settings(max_examples=examples(600))
@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 3), st.booleans(), WISHES)
def test_all_stop_or_none(data, steps, meets, common, wishes):
    """Workers that meet make the same number of steps; others need not."""
    if common or meets:
        steps = steps[:1] * len(steps)
    world = World(steps, meets, common=common)
    play(world, data, wishes)
    stopped = {worker.said[-1] for worker in world.workers}
    assert len(stopped) == 1
    assert not any(said for worker in world.workers for said in worker.said[:-1])
    assert wishes or stopped == {False}
    if common:  # the same answers, at the same reads
        assert all(worker.said == world.workers[0].said for worker in world.workers)
        assert world.sent <= 3 * len(steps) + len(wishes)
    if not wishes:
        assert world.sent == 0


def in_turn(world: World) -> None:
    """Let all go on to the end, with everything delivered at once."""
    for _ in range(40):
        for ends in [*world.on_the_way]:
            while world.on_the_way[ends]:
                world.deliver(ends)
        for worker in world.workers:
            world.move(worker)


@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_early_wish_stops_everybody(common, workers):
    """Asked for before the first step: the first read says so."""
    world = World([10] * workers, 0, common=common)
    world.workers[-1].stopping.wish("test")
    in_turn(world)
    assert [(worker.said, worker.at) for worker in world.workers] == [([True], "closed")] * workers


def test_who_is_held_goes_on_where_another_waits_for_it_and_stops_later():
    world = World([10, 10], 2, common=False)
    first, second = world.workers
    while first.at != "meeting" or first.call is None:  # in the barrier of its second step
        world.move(first)
    second.stopping.wish("test")
    in_turn(world)
    assert [worker.said for worker in world.workers] == [[False, True]] * 2
