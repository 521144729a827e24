"""Sums through shared memory on thread ranks, against plain loops: staged, in place, and with an update in the middle.

Every rank makes the same calls one after another; slots are used again and again, and ranks are slowed down where the
others may be tempted to run ahead.
"""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from store_modes import DTYPES

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.collectives import shared, shared_plans
from mpikv.collectives.shared import WORDS, Executor
from mpikv.collectives.shared_plans import Interval, Region, Slots, Update, in_place_plan, staged_plan, update_plan
from mpikv.common.digests import digest
from mpikv.hostmemory.common_calls import CommonCalls
from mpikv.hostmemory.counters import Counters, table_bytes
from mpikv.hostmemory.polling import Polling
from mpikv.hostmemory.segment import aligned, private_memory
from mpikv.placement.keys import even_bounds, whole_bounds
from mpikv.testing.ranks import spawn
from mpikv.testing.reference import add

F32 = np.dtype(np.float32)
# Every number of ranks with one dtype, every dtype with a few; in each run three, and one.
GRID = pytest.mark.parametrize(
    ("p", "dtype"),
    [
        pytest.param(p, dtype, marks=[] if p == 3 or (dtype == F32 and p in (2, 8)) else pytest.mark.thorough)
        for p in range(2, 9)
        for dtype in DTYPES
        if dtype == F32 or p in (2, 3, 8)
    ],
    ids=str,
)
CHUNK, TINY = 4096, 512  # so that some thousand elements make several chunks
LIMIT_S = 30.0


def wait(request):
    deadline = time.monotonic() + LIMIT_S
    while not request.test():
        assert time.monotonic() < deadline, "a rank has waited too long"
        time.sleep(1e-4)


class Rank:
    def __init__(self, memory):
        self.memory, self.rank, self.size = memory, memory.rank, memory.size
        self.slots = Slots(memory, table_bytes(memory.size, WORDS))
        counters = Counters(memory, 0, WORDS, polling=Polling.of(memory, memory.size))
        self.together = CommonCalls(counters, step=lambda: False, wait_s=LIMIT_S)
        self.executor = Executor(counters)
        self._free = self.slots.end
        self._turn = 0

    def result(self, n, dtype):
        begin, self._free = self._free, self._free + aligned(n * dtype.itemsize)
        return self.memory.array(begin, n, dtype)

    def replicas(self, n, dtype):
        return [self.result(n, dtype) for _ in range(self.size)]

    def run(self, plan_of):
        """plan_of: a plan, or a function of the turn that returns one."""
        plan = plan_of(self._turn) if callable(plan_of) else plan_of
        self.executor.begin(plan)
        assert self.together.begin(digest("call"))
        self._turn ^= 1
        try:
            self.executor.finish(plan, wait)
        finally:
            self.together.end(digest("key"), 1)
        return plan

    def staged(self, value, outs, result=None):
        result = self.result(value.size, value.dtype) if result is None else result
        return staged_plan(self.slots, [Region(result, [Interval(value.size, value, tuple(outs))])])


def on_ranks(size, body):
    """`body(rank)` on thread ranks; a warning of NumPy's is an error."""
    memories = private_memory(size)
    for memory in memories[:1]:
        # What earlier calls leave in the slots must not matter: the largest floats, whose sums would overflow.
        slots = Slots(memory, table_bytes(memory.size, WORDS))
        begin = slots.end - memory.size * slots.per_rank_bytes
        memory.array(begin, slots.end - begin, np.dtype(np.uint8))[:] = 0x7F

    def rank_body(transport):
        with np.errstate(over="raise", invalid="raise"):
            return body(Rank(memories[transport.rank]))

    return spawn(size, rank_body, timeout_s=2 * LIMIT_S)


@pytest.fixture
def small(monkeypatch):
    """Small chunks, so that short arrays have many."""
    monkeypatch.setattr(shared_plans, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(shared_plans, "TINY_BYTES", TINY)


def whole_numbers(rank, n, dtype, seed=0):
    """Sums of eight of them are exact in every dtype."""
    return ((np.arange(n) * 7 + rank * 3 + seed) % 5).astype(dtype)


def random_values(rank, n, dtype, seed=0):
    """Sums depend on the order, and on how often they are rounded."""
    numbers = np.random.default_rng([rank, n, seed])
    return (numbers.standard_normal(n) * 10.0 ** numbers.integers(-2, 3, n)).astype(dtype)


def sizes_of(dtype):
    """1, odd, around a tiny call's limit, around a chunk's, several chunks."""
    tiny, chunk = TINY // dtype.itemsize, CHUNK // dtype.itemsize
    return (1, 7, tiny - 1, tiny, tiny + 1, chunk - 1, chunk, chunk + 1, 3 * chunk, 5 * chunk + 3)


def same(found, expected, what):
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes(), (what, found[:8], expected[:8])


@GRID
def test_the_bits_are_those_of_adding_in_rank_order(small, p, dtype):
    """Staged, in place, and with an update in the middle: float16 and bfloat16 in float32, rounded once.

    The owner of a part gets the sum not yet rounded. Values lie in shared memory or elsewhere.
    """
    values = random_values if dtype.kind in "fV" else whole_numbers

    def body(rank):
        buffer = np.empty(1 << 17, np.uint8)
        scratch = lambda n, found: buffer[: n * found.itemsize].view(found)  # noqa: E731
        for n in sizes_of(dtype):
            value, outs, result = np.empty(n, dtype), [np.full(n, 99, dtype) for _ in range(3)], rank.result(n, dtype)
            staged = rank.staged(value, outs, result)
            replicas = rank.replicas(n, dtype)
            mine, in_place = replicas[rank.rank], in_place_plan(rank.rank, [replicas])
            bounds = (whole_bounds(n, p, n % p), even_bounds(n, p))[n % 2]
            own, kept, updated = slice(*bounds[rank.rank : rank.rank + 2]), [], rank.result(n, dtype)

            def update(total, own=own, kept=kept, updated=updated):
                kept.append(total.copy())
                updated[own] = total.astype(dtype)
                total[:] = 99  # an optimizer may use the memory of the sum

            shared_values = replicas if n % 3 else [value if r == rank.rank else None for r in range(p)]
            key = Update(shared_values, updated, (out := np.empty(n, dtype),), bounds, update)
            with_update = update_plan(rank.slots, [key], scratch)
            for seed in range(2):
                parts = [values(r, n, dtype, seed) for r in range(p)]
                expected = add(parts)
                value[:] = mine[:] = parts[rank.rank]
                rank.run(staged)
                for found in (*outs, result):
                    same(found, expected, ("staged", n, seed))
                same(value, parts[rank.rank], "the value is only read")
                rank.run(with_update)
                same(out, expected, ("update", n, seed))
                wide = add([part.astype(sum_dtype(dtype)) for part in parts])[own]
                assert [total.tobytes() for total in kept] == ([wide.tobytes()] if wide.size else [])
                kept.clear()
                rank.run(in_place)
                same(mine, expected, ("in place", n, seed))

    on_ranks(p, body)


# --- slots used again


def mixture(rank, p):
    order = random.Random(5)
    kinds = {}
    for name, n in (("tiny", 3), ("tiny 2", 100), ("chunk", 900), ("large", 5000), ("larger", 9001)):
        value, out = np.empty(n, np.float32), np.empty(n, np.float32)
        kinds[name] = (value, out, rank.staged(value, [out]))
        replicas = rank.replicas(n, np.dtype(np.float32))
        kinds[name + " in place"] = (replicas[rank.rank], replicas[rank.rank], in_place_plan(rank.rank, [replicas]))
        value, out, result, total = (np.zeros(n, np.float32) for _ in range(4))
        result, bounds = rank.result(n, value.dtype), even_bounds(n, p)
        part = result[bounds[rank.rank] : bounds[rank.rank + 1]]
        key = Update(
            [value if r == rank.rank else None for r in range(p)],
            result,
            (out,),
            bounds,
            lambda total, part=part: part.__setitem__(slice(None), total),
        )
        plan = update_plan(rank.slots, [key], lambda k, dtype, total=total: total[:k])
        kinds[name + " update"] = (value, out, plan)
    names = sorted(kinds)
    for i in range(60):
        # Runs of one kind, and changes.
        if i % 4 == 0:
            name = order.choice(names)
        elif i % 4 == 3:
            name = order.choice([one for one in names if one.startswith("tiny")])
        value, out, plan = kinds[name]
        value[:] = random_values(rank.rank, value.size, np.float32, i)
        rank.run(plan)
        same(out, add([random_values(r, out.size, np.float32, i) for r in range(p)]), (i, name))


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("step", ["copy_all", "add_all"])
def test_slots_are_not_used_again_while_a_slow_rank_still_reads(small, monkeypatch, step, slow):
    """One rank sleeps before or amid its copies and sums, the others run on as far as they may."""
    original = getattr(shared, step)
    numbers = random.Random(slow)

    def slowly(entries):
        if threading.current_thread().name != f"rank {slow}":
            return original(entries)
        for entry in entries if step == "add_all" else zip(entries.destinations, entries.sources, strict=True):
            if numbers.random() < 0.1:
                time.sleep(0.002)
            if step == "add_all":
                original([entry])
            else:
                one = shared.Copies()
                one.add([entry])
                original(one)
        return None

    monkeypatch.setattr(shared, step, slowly)
    on_ranks(3, lambda rank: mixture(rank, 3))


def test_a_call_that_did_not_take_place_leaves_no_trace():
    def body(rank):
        rank.together._wait_s = 0.001
        found = []
        for n in (3, 70_000):
            value, out = np.full(n, 100.0, np.float32), np.empty(n, np.float32)
            plan = rank.staged(value, [out])
            turn = rank._turn
            rank.executor.begin(plan(turn))
            assert not rank.together.begin(digest("mine", rank.rank, n))
            rank.together.pushed(digest("key"), 1)
            value[:] = rank.rank + 1
            rank.together._wait_s = LIMIT_S
            rank.run(plan)
            found.append(np.unique(out).tolist())
        return found

    assert on_ranks(3, body) == [[[6.0], [6.0]]] * 3
