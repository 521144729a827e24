"""Meetings of ranks: all decide alike, whoever comes when, and nobody waits for ever.

Interleavings are tried out one word access at a time: the ranks are threads of which one runs at any moment, and a
random generator chooses, at every access, who goes on. Stores wait in a buffer of their rank until they are flushed, as
on real processors, so that a missing barrier shows.
"""

from __future__ import annotations

import random
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv.hostmemory import counters as module
from mpikv.hostmemory.counters import FILLED, SUMMED, CallCounters, digest, history_hash
from mpikv.hostmemory.segment import private_memory

STEPS = 50_000  # far more than any schedule takes that ends


class Interleaving:
    """Runs one body per rank, one word access at a time."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.memory = [0] * (size * module.WORDS_PER_RANK)
        self.buffers: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self._random = random.Random(seed)
        # Long runs of one rank find other mistakes than quick changes.
        self._stay = self._random.choice([0.0, 0.5, 0.9, 0.99])
        self._flush = self._random.choice([0.05, 0.3, 1.0])
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._alive = list(range(size))
        self._steps = 0
        self._over = threading.Event()
        self.errors: list[BaseException] = []
        self.current = 0

    def words(self, rank: int) -> Words:
        return Words(self, rank)

    def flush(self, rank: int, count: int | None = None) -> None:
        buffer = self.buffers[rank]
        for index, value in buffer[:count]:
            self.memory[index] = value
        del buffer[:count]

    def point(self, rank: int) -> None:
        """Somebody else may go on here."""
        self._steps += 1
        if self._steps > STEPS or self.errors:
            raise AssertionError(f"no end after {STEPS} steps: the ranks wait for each other")
        for other in range(self.size):
            if self.buffers[other] and self._random.random() < self._flush:
                self.flush(other, 1)
        if self._random.random() >= self._stay:
            self._hand_over(rank)

    def _hand_over(self, rank: int) -> None:
        chosen = self._random.choice(self._alive)
        if chosen != rank:
            self.current = chosen
            self._turns[chosen].release()
            self._turns[rank].acquire()

    def run(self, body) -> list:
        results: list = [None] * self.size

        def thread(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                results[rank] = body(rank)
            except BaseException as error:
                self.errors.append(error)
            self.flush(rank)
            self._alive.remove(rank)
            if self._alive:
                self.current = self._random.choice(self._alive)
                self._turns[self.current].release()
            else:
                self._over.set()

        threads = [threading.Thread(target=thread, args=(rank,), daemon=True) for rank in range(self.size)]
        for one in threads:
            one.start()
        self.current = self._random.randrange(self.size)
        self._turns[self.current].release()
        assert self._over.wait(60)
        if self.errors:
            raise self.errors[0]
        return results


class Words:
    """One rank's view of the words."""

    def __init__(self, world: Interleaving, rank: int) -> None:
        self._world, self._rank = world, rank

    def __getitem__(self, index: int) -> int:
        self._world.point(self._rank)
        for stored, value in reversed(self._world.buffers[self._rank]):
            if stored == index:
                return value
        return self._world.memory[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._world.point(self._rank)
        self._world.buffers[self._rank].append((index, value))


def counters(world: Interleaving, patience: list[int], patch: pytest.MonkeyPatch) -> list[CallCounters]:
    """patience: how often each rank yields before it gives up."""
    patch.setattr(module, "fence", lambda: world.flush(world.current))
    patch.setattr(module, "CROWDED_POLLS", 2)
    made = []
    for rank in range(world.size):
        patch.setattr(module, "CROWDED_YIELDS", patience[rank])
        memory = SimpleNamespace(rank=rank, size=world.size, words=lambda offset, count, rank=rank: world.words(rank))
        made.append(
            CallCounters(
                memory,
                step=lambda: False,
                crowded=True,
                yield_=lambda rank=rank: world.point(rank),
                patience_s=0.0,
            )
        )
    return made


def key_digest(key: int) -> int:
    return digest("key", key)


def play(world: Interleaving, ranks: list[CallCounters], keys: list[int], calls: list[list[tuple[str, list[int]]]]):
    """Each rank makes its calls, (how, positions in `keys`): 'wait' as pushpull, 'push' as push_async.

    Returns for each rank and position how it was pushed: () alone, else the positions of the common call in order.
    """
    pushed = [[0] * len(keys) for _ in ranks]  # by rank and position, for the waits of calls that did not meet

    def body(rank: int) -> list[tuple[int, ...]]:
        counters = ranks[rank]
        log: list[tuple[int, ...]] = [(-1,)] * len(keys)
        for how, positions in calls[rank]:
            hashes = [key_digest(keys[position]) for position in positions]
            call = digest(
                "staged", [keys[position] for position in positions], [position * 64 for position in positions]
            )
            if how == "wait" and counters.together(call):
                for position in positions:
                    log[position] = tuple(positions)
                counters.end(history_hash(hashes), len(hashes))
                continue
            for position, hash_ in zip(positions, hashes, strict=True):
                counters.pushed(hash_, 1)
                pushed[rank][position] = 1
                log[position] = ()
            while how == "wait" and not all(one[position] for one in pushed for position in positions):
                world.point(rank)
        return log

    return world.run(body)


def cut(draw_points: set[int], n: int) -> list[list[int]]:
    bounds = [0, *sorted(draw_points), n]
    return [list(range(a, b)) for a, b in pairwise(bounds) if a < b]


@settings(max_examples=250)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_all_decide_alike_and_nobody_waits_for_ever(data, seed):
    """Ranks push the same keys in the same order, cut into different calls, some of them without waiting."""
    size = data.draw(st.integers(2, 5))
    n = data.draw(st.integers(1, 5))
    keys = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    common = data.draw(st.sets(st.integers(1, n - 1))) if n > 1 else set()
    calls = []
    for _ in range(size):
        differs = data.draw(st.sampled_from([False, False, True]))
        points = data.draw(st.sets(st.integers(1, n - 1))) if differs and n > 1 else common
        groups = cut(points, n)
        hows = [data.draw(st.sampled_from(["wait", "wait", "push"])) if differs else "wait" for _ in groups]
        turned = [differs and data.draw(st.booleans()) for _ in groups]
        calls.append(
            [(how, group[::-1] if turn else group) for how, group, turn in zip(hows, groups, turned, strict=True)]
        )
    patience = [data.draw(st.sampled_from([0, 1, 2, 5, 20, 1000])) for _ in range(size)]
    world = Interleaving(size, seed)
    with pytest.MonkeyPatch.context() as patch:
        logs = play(world, counters(world, patience, patch), keys, calls)
    assert all(log == logs[0] for log in logs), (logs, calls, patience)
    assert (-1,) not in logs[0]


@settings(max_examples=120)
@given(size=st.integers(2, 5), seed=st.integers(0, 2**32), lengths=st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_ranks_that_make_the_same_calls_and_are_patient_always_meet(size, seed, lengths):
    """Else the steady state would not be without messages."""
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    calls = [("wait", list(range(a, b))) for a, b in pairwise(bounds)]
    keys = [position % 3 for position in range(bounds[-1])]
    world = Interleaving(size, seed)
    with pytest.MonkeyPatch.context() as patch:
        logs = play(world, counters(world, [10**6] * size, patch), keys, [calls] * size)
    expected = [tuple(positions) for _, positions in calls for _ in positions]
    assert logs == [expected] * size


@settings(max_examples=60)
@given(size=st.integers(2, 4), seed=st.integers(0, 2**32), impatient=st.integers(0, 3))
def test_after_a_withdrawal_they_meet_again(size, seed, impatient):
    """One rank has no patience in its first call, all have much in the later ones."""
    calls = [("wait", [position]) for position in range(4)]
    world = Interleaving(size, seed)
    with pytest.MonkeyPatch.context() as patch:
        ranks = counters(world, [10**6] * size, patch)
        hasty = ranks[impatient % size]
        hasty._yields = range(0)
        meet = hasty.together

        def first_hastily(call: int) -> bool:
            together = meet(call)
            hasty._yields = range(10**6)
            return together

        hasty.together = first_hastily  # type: ignore[method-assign]
        logs = play(world, ranks, [0, 1, 0, 1], [calls] * size)
    assert logs[0][0] in ((), (0,))
    assert logs == [[logs[0][0], (1,), (2,), (3,)]] * size


def test_a_missing_barrier_would_be_found():
    """Else the interleavings above would prove little."""

    def agree(seed: int) -> bool:
        world = Interleaving(2, seed)
        with pytest.MonkeyPatch.context() as patch:
            ranks = counters(world, [0, 0], patch)
            patch.setattr(module, "fence", lambda: None)
            try:
                logs = play(world, ranks, [0, 1], [[("wait", [0]), ("wait", [1])]] * 2)
            except AssertionError:
                return False
        return logs[0] == logs[1]

    assert not all(agree(seed) for seed in range(200))


# --- real memory and real threads


def on_threads(size: int, body, *, patience_s: float = 0.25):
    """`body(counters)` on a thread per rank; the results in rank order."""
    made = [
        CallCounters(memory, step=lambda: False, crowded=True, yield_=lambda: time.sleep(0), patience_s=patience_s)
        for memory in private_memory(size)
    ]
    results: list = [None] * size
    errors = []

    def thread(rank: int) -> None:
        try:
            results[rank] = body(made[rank])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=thread, args=(rank,), daemon=True) for rank in range(size)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
        assert not one.is_alive()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_late_rank_is_waited_for(size, late):
    def body(counters):
        if counters.rank == late:
            time.sleep(0.05)
        together = counters.together(digest("call"))
        if together:
            counters.end(digest("a"), 1)
        return together

    assert on_threads(size, body, patience_s=20) == [True] * size


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_who_does_not_come_is_not_waited_for_for_ever(absent):
    def body(counters):
        return None if counters.rank == absent else counters.together(digest("call"))

    assert on_threads(3, body, patience_s=0.02) == [None if rank == absent else False for rank in range(3)]


@pytest.mark.parametrize("other", [0, 1, 2])
def test_another_call_or_another_history_ends_the_wait_at_once(other):
    """Before the patience of a minute is over."""

    def another_call(counters):
        together = counters.together(digest("other" if counters.rank == other else "call"))
        counters.pushed(digest("a"), 1)
        return together

    def gone_past(counters):
        if counters.rank == other:
            counters.pushed(digest("a"), 1)
            return False
        together = counters.together(digest("call"))
        counters.pushed(digest("a"), 1)
        return together

    for body in (another_call, gone_past):
        assert on_threads(3, body, patience_s=60) == [False] * 3


def test_the_order_of_earlier_pushes_does_not_matter_but_what_was_pushed_does():
    def body(counters, keys):
        for key in keys[counters.rank]:
            counters.pushed(digest("key", key), 1)
        return counters.together(digest("call"))

    same = ["abca", "acba", "aabc"]
    assert on_threads(3, lambda counters: body(counters, same), patience_s=20) == [True] * 3
    for others in (["ab", "ab", "ac"], ["ac", "ab", "ab"], ["aab", "abb", "aab"]):
        assert on_threads(3, lambda counters, others=others: body(counters, others), patience_s=0.05) == [False] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_real_threads_with_little_patience_decide_alike(size):
    def body(counters):
        naps = random.Random(counters.rank)
        decided = []
        for i in range(150):
            time.sleep(naps.choice([0, 0, 0, 0.0005, 0.002]))
            together = counters.together(digest("call", i % 3))
            decided.append(together)
            (counters.end if together else counters.pushed)(digest("key", i % 3), 1)
        return decided

    results = on_threads(size, body, patience_s=0.001)
    assert all(result == results[0] for result in results)


def test_steps_inside_a_call():
    """Who has waited for a step sees what the others wrote before it."""
    values = [0] * 4

    def body(counters):
        def wait(test):
            deadline = time.monotonic() + 20
            while not test():
                assert time.monotonic() < deadline
                time.sleep(0)

        seen = []
        for step in range(1, 60):
            values[counters.rank] = step
            counters.reach(FILLED, step)
            counters.wait_all(FILLED, step, wait)
            seen.append(tuple(values) == (step,) * 4)
            counters.reach(SUMMED, step)
            counters.wait_all(SUMMED, step, wait)
        return all(seen)

    assert on_threads(4, body) == [True] * 4


def test_a_wait_that_takes_long_is_handed_over():
    """To whoever knows the time limit; what that raises reaches the caller."""

    def body(counters):
        if counters.rank == 1:
            return None

        def wait(test):
            assert not test()
            raise TimeoutError

        with pytest.raises(TimeoutError):
            counters.wait_all(SUMMED, 1, wait)
        return True

    assert on_threads(2, body) == [True, None]


def test_digests_differ():
    assert len({digest(), digest("a"), digest("b"), digest("a", "b"), digest(["a", "b"]), digest("ab"), digest(1)}) == 7
    assert history_hash([digest("a"), digest("b")]) == history_hash([digest("b"), digest("a")])
    assert 0 <= history_hash([2**64 - 1] * 5) < 2**64
