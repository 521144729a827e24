"""Whether ranks are in the same call: all decide alike, whoever comes when, and nobody waits for ever.

Most tests run on interleaved words (interleaving.py).
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import Interleaving
from virtual_clock import VirtualClock

from mpikv.common.digests import MASK, digest, history_hash
from mpikv.hostmemory.common_calls import FREE, INTENT, CommonCalls
from mpikv.hostmemory.counters import Counters, row_words
from mpikv.hostmemory.polling import Polling
from mpikv.hostmemory.segment import private_memory

WORDS = row_words(FREE)


def sides(world: Interleaving, patience: list, patch: pytest.MonkeyPatch) -> list[CommonCalls]:
    """patience: of each rank, as a range: how often it yields before it gives up."""
    world.flushing(patch)
    made = []
    for rank, yields in enumerate(patience):
        patient = Polling(range(2), yields, lambda rank=rank: world.point(rank))
        counters = Counters(world.host_memory(rank), 0, FREE, polling=patient)
        made.append(CommonCalls(counters, step=lambda: False, wait_s=0.0))
    return made


def play(world: Interleaving, ranks: list[CommonCalls], keys: list[int], calls: list[list[tuple[str, list[int]]]]):
    """Each rank makes its calls, (how, positions in `keys`): 'wait' as pushpull, 'push' as push_async.

    Returns for each rank and position how it was pushed: () alone, else the positions of the common call in order.
    """
    pushed = [[0] * len(keys) for _ in ranks]  # by rank and position, for the waits of calls that did not meet

    def body(rank: int) -> list[tuple[int, ...]]:
        together = ranks[rank]
        log: list[tuple[int, ...]] = [(-1,)] * len(keys)
        for how, positions in calls[rank]:
            hashes = [digest("key", keys[position]) for position in positions]
            call = digest("staged", [keys[position] for position in positions], positions)
            if how == "wait" and together.begin(call):
                for position in positions:
                    log[position] = tuple(positions)
                together.end(history_hash(hashes), len(hashes))
                continue
            for position, hash_ in zip(positions, hashes, strict=True):
                together.pushed(hash_, 1)
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
    patience = [range(data.draw(st.sampled_from([0, 1, 2, 5, 20, 1000]))) for _ in range(size)]
    world = Interleaving(size, size * WORDS, seed)
    with pytest.MonkeyPatch.context() as patch:
        logs = play(world, sides(world, patience, patch), keys, calls)
    assert all(log == logs[0] for log in logs), (logs, calls, patience)
    assert (-1,) not in logs[0]


@settings(max_examples=120)
@given(size=st.integers(2, 5), seed=st.integers(0, 2**32), lengths=st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_ranks_that_make_the_same_calls_and_are_patient_always_meet(size, seed, lengths):
    """Else the steady state would not be without messages."""
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    calls = [("wait", list(range(a, b))) for a, b in pairwise(bounds)]
    keys = [position % 3 for position in range(bounds[-1])]
    world = Interleaving(size, size * WORDS, seed)
    with pytest.MonkeyPatch.context() as patch:
        logs = play(world, sides(world, [range(10**6)] * size, patch), keys, [calls] * size)
    expected = [tuple(positions) for _, positions in calls for _ in positions]
    assert logs == [expected] * size


class GrowingPatience:
    def __init__(self) -> None:
        self._next = 0

    def __iter__(self):
        found, self._next = self._next, 10**6
        return iter(range(found))


@settings(max_examples=60)
@given(size=st.integers(2, 4), seed=st.integers(0, 2**32), impatient=st.integers(0, 3))
def test_after_a_withdrawal_they_meet_again(size, seed, impatient):
    """One rank has no patience the first time that it has to wait, all have much otherwise."""
    calls = [("wait", [position]) for position in range(4)]
    world = Interleaving(size, size * WORDS, seed)
    with pytest.MonkeyPatch.context() as patch:
        patience = [GrowingPatience() if rank == impatient % size else range(10**6) for rank in range(size)]
        ranks = sides(world, patience, patch)
        logs = play(world, ranks, [0, 1, 0, 1], [calls] * size)
    apart = [position for position, met in enumerate(logs[0]) if met == ()]
    assert len(apart) <= 1
    assert logs == [[() if position in apart else (position,) for position in range(4)]] * size


# --- real memory and real threads, and a time that passes only where a test lets it


def on_threads(size: int, body, *, meanwhile=lambda clock, over: None):
    """`body(rank, together)` on a thread per rank; results in rank order. meanwhile(clock, over): on this thread."""
    clock, patience = VirtualClock(), Polling(range(3), range(3), lambda: time.sleep(0))

    def thread(memory):
        counters = Counters(memory, 0, FREE, polling=patience)
        return body(memory.rank, CommonCalls(counters, step=lambda: False, clock=clock, wait_s=1.0))

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(thread, memory) for memory in private_memory(size)]
        meanwhile(clock, lambda: all(one.done() for one in ranks))
        return [one.result(60) for one in ranks]


def let_time_pass(clock, over):
    while not over():
        clock.advance(1.0, until=over)


@pytest.mark.parametrize(("late", "size"), [(0, 2), (0, 3), (1, 5)])
def test_a_late_rank_is_waited_for(size, late):
    come = threading.Event()

    def body(rank, together):
        if rank == late:
            assert come.wait(60)
        met = together.begin(digest("call"))
        if met:
            together.end(digest("a"), 1)
        return met

    def nearly(clock, over):
        # The first rank waits for one after another; the others for the first.
        clock.advance(0.9, turns=3, lookers=1 if late == 0 or size == 2 else 2)
        come.set()

    assert on_threads(size, body, meanwhile=nearly) == [True] * size


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_who_does_not_come_is_not_waited_for_for_ever(absent):
    def body(rank, together):
        return None if rank == absent else together.begin(digest("call"))

    found = on_threads(3, body, meanwhile=let_time_pass)
    assert found == [None if rank == absent else False for rank in range(3)]


@pytest.mark.parametrize("other", [0, 1, 2])
def test_another_call_or_another_history_ends_the_wait_at_once(other):
    def body(gone_past, rank, together):
        mine = rank == other
        met = not (mine and gone_past) and together.begin(digest("other" if mine else "call"))
        together.pushed(digest("a"), 1)
        return met

    for gone_past in (False, True):
        assert on_threads(3, partial(body, gone_past)) == [False] * 3


@pytest.mark.parametrize("who", [0, 1])
def test_a_push_of_this_rank_meanwhile_ends_the_wait_at_once(who):
    """No time passes. What it waits for belongs to another history now, and no other rank will want it."""
    counters = Counters(private_memory(2)[who], 0, FREE, polling=Polling(range(3), range(3), lambda: None))

    def push() -> bool:
        together.pushed(digest("a"), 1)
        return True

    waits: list[float] = []
    together = CommonCalls(counters, step=push, clock=VirtualClock(), waited=waits.append)
    assert not together.begin(digest("call"))
    assert len(waits) == 1


@pytest.mark.parametrize(("who", "decides"), [(0, False), (1, False), (1, True)])
def test_a_death_meanwhile_ends_the_wait_at_once(who, decides):
    """No time passes. decides: the first rank has died when it was about to decide."""
    counters = Counters(private_memory(2)[who], 0, FREE, polling=Polling(range(3), range(3), lambda: None))
    failures: list[bool] = []

    def step() -> bool:
        failures.append(True)
        return True

    call, limit_s = digest("call"), 0.0 if decides else 1.0
    together = CommonCalls(counters, step=step, clock=VirtualClock(), wait_s=limit_s, failed=lambda: bool(failures))
    if decides:
        counters.words[counters.rows[0] + INTENT] = call & MASK
    assert not together.begin(call)
    assert len(failures) == 1
