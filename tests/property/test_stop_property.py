"""The agreement to stop under random interleavings: nobody waits for ever, and either all stop or none.

Messages travel in order between two workers, and not otherwise. A synchronous worker's step ends when every worker has
begun it; asynchronous ones meet in barriers at some steps. Workers answer whenever a message comes, also while they
wait, as the progress engine does.
"""

from __future__ import annotations

from collections import deque

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv.session.stop import Leader, StopAnswer, StopReader


class Worker:
    """A program: in each step it works, meets the others where it must, and reads; `at` says where it is."""

    def __init__(self, number: int, steps: int, *, common: bool) -> None:
        self.number = number
        self.steps = steps
        self.reader = StopReader(common=common)
        self.step = 0  # that it is in, from 1 on
        self.at = "work"  # work, meeting, reading, closing, stopped
        self.said: list[bool] = []


class World:
    """All workers, the messages between them, and the leader beside worker 0."""

    def __init__(self, steps: list[int], meets: int, *, common: bool) -> None:
        self.common = common
        self.meets = meets  # asynchronous: every so many steps all wait in a barrier; 0: never
        self.workers = [Worker(i, n, common=common) for i, n in enumerate(steps)]
        self.leader = Leader(len(steps), common=common)
        self.to = [deque() for _ in steps]  # orders to each worker
        self.back = [deque() for _ in steps]  # answers and wishes of each worker
        self.messages = 0

    # --- messages

    def order(self, orders) -> None:
        for order in orders:
            self.messages += 1
            self.to[order.worker].append(order)

    def answer(self, worker: Worker, answer: StopAnswer | None) -> None:
        if answer is not None:
            self.messages += 1
            self.back[worker.number].append(answer)

    def wish(self, worker: Worker) -> None:
        self.back[worker.number].append("wish")

    def deliver(self, box: deque, number: int) -> None:
        message = box.popleft()
        if box is self.to[number]:
            self.answer(self.workers[number], self.workers[number].reader.obey(message.kind, message.value))
        elif message == "wish":
            self.order(self.leader.wish())
        else:
            self.order(self.leader.answer(number, message))

    # --- programs

    def blocked(self) -> set[int]:
        """Those who wait in a call that all must make. What the leader knows of them may be old, but not wrong."""
        return {w.number for w in self.workers if w.at in ("meeting", "closing") and not self.met(w)}

    def met(self, worker: Worker) -> bool:
        if worker.at == "closing":
            return all(other.at == "closing" for other in self.workers)
        return all(other.step >= worker.step for other in self.workers)

    def can_move(self, worker: Worker) -> bool:
        if worker.at == "meeting":
            return self.met(worker)
        return worker.at not in ("closing", "stopped")

    def move(self, worker: Worker) -> None:
        if worker.at == "work":
            worker.step += 1
            meets = self.common or (self.meets and worker.step % self.meets == 0)
            worker.at = "meeting" if meets else "reading"
        elif worker.at == "meeting":
            worker.at = "reading"
        elif worker.at == "reading":
            said, answer = worker.reader.read()
            self.answer(worker, answer)
            if said is not None:
                worker.said.append(said)
                worker.at = "stopped" if said else ("closing" if worker.step == worker.steps else "work")
        if not self.common:
            self.order(self.leader.blocked(self.blocked()))

    def moves(self) -> list:
        found = [(self.move, worker) for worker in self.workers if self.can_move(worker)]
        return found + [
            (lambda box_number: self.deliver(*box_number), (box, number))
            for boxes in (self.to, self.back)
            for number, box in enumerate(boxes)
            if box
        ]

    def held(self, worker: Worker) -> bool:
        return worker.at == "reading" and worker.reader._held


def play(world: World, data: st.DataObject, wishes: list[tuple[int, int]]) -> None:
    """Move on at random until everybody is at the end. A wish comes after so many moves, at such a worker."""
    after = sorted(wishes)
    for turn in range(4000):
        while after and after[0][0] <= turn:
            world.wish(world.workers[after.pop(0)[1] % len(world.workers)])
        moves = world.moves()
        # A held read may be tried at any time, and changes nothing: what else is there?
        real = [move for move in moves if not (move[0] == world.move and world.held(move[1]))]
        if not real and not after:
            for act, what in moves:
                act(what)
            moves = world.moves()
            if all(w.at in ("stopped", "closing") for w in world.workers):
                return
            if not [move for move in moves if not (move[0] == world.move and world.held(move[1]))]:
                raise AssertionError(f"nobody moves: {[(w.step, w.at, w.reader.__dict__) for w in world.workers]}")
        if moves:
            # Half of the turns are fair, so that every play ends.
            act, what = moves[data.draw(st.integers(0, len(moves) - 1)) if turn % 2 else turn // 2 % len(moves)]
            act(what)
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
    assert {worker.at for worker in world.workers} in ({"stopped"}, {"closing"})
    if not wishes:
        assert world.workers[0].at == "closing"
    if common:  # the same answers, at the same reads
        assert all(worker.said == world.workers[0].said for worker in world.workers)
        assert world.messages <= 3 * len(steps)
    if not wishes and (common or not meets):
        assert world.messages == 0


@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_early_wish_stops_everybody(common, workers):
    """Asked for before the first step, with everything delivered at once: the first read says so."""
    world = World([10] * workers, 0, common=common)
    world.wish(world.workers[-1])
    for _ in range(20):
        while any((*world.to, *world.back)):
            for boxes in (world.to, world.back):
                for number, box in enumerate(boxes):
                    if box:
                        world.deliver(box, number)
        for worker in world.workers:
            if world.can_move(worker):
                world.move(worker)
    assert [worker.said for worker in world.workers] == [[True]] * workers


def test_leader_that_has_ended_says_nothing():
    leader = Leader(2, common=True)
    assert len(leader.wish()) == 2
    assert not leader.settled
    leader.end()
    assert leader.answer(0, StopAnswer(1, 3)) == []
    assert leader.answer(1, StopAnswer(1, 3)) == []
    assert leader.settled
    assert leader.wish() == []


def test_old_answers_do_not_count():
    leader = Leader(2, common=False)
    assert [order.kind for order in leader.wish()] == ["ask", "ask"]
    leader.answer(0, StopAnswer(1, 5))
    assert [order.kind for order in leader.blocked({1})] == ["go", "ask", "ask"]
    assert leader.answer(0, StopAnswer(1, 5)) == []
    leader.blocked(())
    leader.answer(1, StopAnswer(2, 1))
    assert [(o.worker, o.kind, o.value) for o in leader.answer(0, StopAnswer(2, 6))] == [(0, "stop", 7), (1, "stop", 2)]
