"""Sums through shared memory on thread ranks, against plain loops: staged, in place, and with an update in the middle.

Every rank makes the same calls one after another; slots are used again and again, and ranks are slowed down where the
others may be tempted to run ahead.
"""

from __future__ import annotations

import random
import threading
import time

import ml_dtypes
import numpy as np
import pytest

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

DTYPES = tuple(
    np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64)
)
F32 = np.dtype(np.float32)
# Every number of ranks with one dtype, every dtype with a few.
GRID = pytest.mark.parametrize(
    ("p", "dtype"),
    [(p, dtype) for p in range(2, 9) for dtype in DTYPES if dtype == F32 or p in (2, 3, 8)],
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
        self.executor = Executor(counters, wait)
        self._free = self.slots.end
        self._turn = 0

    def reserve(self, n_bytes):
        begin = self._free
        self._free += aligned(n_bytes)
        return begin

    def result(self, n, dtype):
        return self.memory.array(self.reserve(n * dtype.itemsize), n, dtype)

    def replicas(self, n, dtype):
        return [self.result(n, dtype) for _ in range(self.size)]

    def run(self, plan_of):
        """plan_of: a plan, or a function of the turn that returns one."""
        plan = plan_of(self._turn) if callable(plan_of) else plan_of
        self.executor.begin(plan)
        assert self.together.begin(digest("call"))
        self._turn ^= 1
        try:
            self.executor.finish(plan)
        finally:
            self.together.end(digest("key"), 1)
        return plan

    def staged(self, values, outs, results=None):
        """One region per array; outs: for each a tuple of arrays."""
        results = results or [self.result(value.size, value.dtype) for value in values]
        regions = [
            Region(result, [Interval(value.size, value, tuple(out))])
            for result, value, out in zip(results, values, outs, strict=True)
            if value.size
        ]
        return staged_plan(self.slots, regions)


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
    """0, 1, odd, around a tiny call's limit, around a chunk's, several chunks."""
    tiny, chunk = TINY // dtype.itemsize, CHUNK // dtype.itemsize
    return (0, 1, 7, tiny - 1, tiny, tiny + 1, chunk - 1, chunk, chunk + 1, 3 * chunk, 5 * chunk + 3)


def same(found, expected, what):
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes(), (what, found[:8], expected[:8])


# --- the grid


@GRID
def test_the_bits_are_those_of_adding_in_rank_order(small, p, dtype):
    """Staged, in place, and with an update in the middle: float16 and bfloat16 in float32, rounded once.

    The owner of a part gets the sum not yet rounded. Values lie in shared memory or elsewhere.
    """
    values = random_values if dtype.kind in "fV" else whole_numbers

    def body(rank):
        buffer = np.empty(1 << 17, np.uint8)
        scratch = lambda n, found: buffer[: n * found.itemsize].view(found)  # noqa: E731
        for n in sizes_of(dtype)[1:]:
            value, outs, result = np.empty(n, dtype), [np.full(n, 99, dtype) for _ in range(3)], rank.result(n, dtype)
            staged = rank.staged([value], [outs], [result])
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


TRUE_TINY, TRUE_CHUNK = shared_plans.TINY_BYTES // 4, shared_plans.CHUNK_BYTES // 4


@pytest.mark.parametrize(
    "n",
    [1, TRUE_TINY, TRUE_TINY + 1, TRUE_CHUNK - 1, TRUE_CHUNK, TRUE_CHUNK + 1, 4 * TRUE_CHUNK + 17],
)
def test_true_sizes_of_chunks(n):
    def body(rank):
        value, out = random_values(rank.rank, n, np.float32), np.empty(n, np.float32)
        rank.run(rank.staged([value], [[out]]))
        replicas = rank.replicas(n, value.dtype)
        replicas[rank.rank][:] = value
        rank.run(in_place_plan(rank.rank, [replicas]))
        same(replicas[rank.rank], out, n)
        return out

    for out in on_ranks(3, body):
        same(out, add([random_values(r, n, np.float32) for r in range(3)]), n)


# --- several arrays in one call


def arena_regions(rank, arrays, outs):
    """As a store places its keys: each at a cache line, those of one dtype side by side as one region with gaps."""
    regions, end = [], -1
    for value, targets in zip(arrays, outs, strict=True):
        begin = rank.reserve(value.nbytes)
        gap = begin - end
        if regions and regions[-1][1] == value.dtype and 0 <= gap < 64:
            if gap:
                regions[-1][2].append(Interval(gap // value.itemsize, None, ()))
        else:
            regions.append((begin, value.dtype, []))
        regions[-1][2].append(Interval(value.size, value, tuple(targets)))
        end = begin + value.nbytes
    return [
        Region(rank.memory.array(begin, sum(interval.n_elems for interval in intervals), dtype), intervals)
        for begin, dtype, intervals in regions
    ]


@pytest.mark.parametrize("p", [2, 3, 8])
@pytest.mark.parametrize("n_arrays", [2, 3, 17, 120])
def test_many_arrays_with_gaps_and_of_several_dtypes(small, p, n_arrays):
    numbers = np.random.default_rng(n_arrays)
    shapes = [
        (int(numbers.choice([1, 3, 5, 31, 100, 333, 1500])), DTYPES[int(numbers.choice(8)) if i % 3 else 2])
        for i in range(n_arrays)
    ]

    def body(rank):
        values = [np.empty(n, dtype) for n, dtype in shapes]
        # One out, none, or two; or the value itself.
        outs = [[np.empty(n, dtype) for _ in range(i % 3)] for i, (n, dtype) in enumerate(shapes)]
        outs = [[value] if i % 5 == 4 else targets for i, (value, targets) in enumerate(zip(values, outs, strict=True))]
        regions = arena_regions(rank, values, outs)
        plan = staged_plan(rank.slots, regions)
        for seed in range(3):
            for i, value in enumerate(values):
                value[:] = whole_numbers(rank.rank, value.size, value.dtype, seed + i)
            rank.run(plan)
            for i, (n, dtype) in enumerate(shapes):
                expected = sum(whole_numbers(r, n, np.int64, seed + i) for r in range(p)).astype(dtype)
                for out in outs[i]:
                    same(out, expected, (i, n, dtype))
        # The gaps are part of the regions; nothing may pile up in them.
        return [
            (a, float(np.abs(region.result[a : a + piece.n_elems].astype(np.float64)).max()))
            for region in regions
            for a, piece in zip(
                np.cumsum([0] + [one.n_elems for one in region.intervals]), region.intervals, strict=False
            )
            if piece.value is None
        ]

    for gaps in on_ranks(p, body):
        assert all(largest == 0 for _, largest in gaps)
        assert n_arrays < 17 or gaps


@pytest.mark.parametrize("p", [2, 3, 5])
def test_updates_of_many_keys_share_the_scratch_memory(small, p):
    shapes = [(n, dtype) for n in (1, 5, 64, 700, 5000) for dtype in (DTYPES[0], DTYPES[2], DTYPES[7])]

    def body(rank):
        buffer = np.empty(1 << 17, np.uint8)
        keys, outs, values = [], [], []
        for i, (n, dtype) in enumerate(shapes):
            bounds = even_bounds(n, p) if i % 4 else whole_bounds(n, p, i % p)
            value, out, result = np.empty(n, dtype), np.empty(n, dtype), rank.result(n, dtype)
            part = result[bounds[rank.rank] : bounds[rank.rank + 1]]
            values.append(value)
            outs.append(out)
            replicas = rank.replicas(n, dtype)
            if i % 3 == 1:
                values[-1] = value = replicas[rank.rank]
                shared_values = replicas
            else:
                shared_values = [value if r == rank.rank else None for r in range(p)]

            def update(total, part=part):
                part += total.astype(part.dtype)
                total[:] = 99  # an optimizer may use the memory of the sum

            keys.append(Update(shared_values, result, (out,), bounds, update))
        plan = update_plan(rank.slots, keys, lambda k, dtype: buffer[: k * dtype.itemsize].view(dtype))
        for seed in range(2):
            for i, value in enumerate(values):
                value[:] = whole_numbers(rank.rank, value.size, value.dtype, seed + i)
            rank.run(plan)
        for i, ((n, dtype), out) in enumerate(zip(shapes, outs, strict=True)):
            total = sum(whole_numbers(r, n, np.int64, seed + i) for r in range(p) for seed in range(2))
            same(out, total.astype(dtype), (i, n, dtype))

    on_ranks(p, body)


# --- slots used again


def mixture(rank, p, naps, calls=60):
    order = random.Random(5)
    kinds = {}
    for name, n in (("tiny", 3), ("tiny 2", 100), ("chunk", 900), ("large", 5000), ("larger", 9001)):
        value, out = np.empty(n, np.float32), np.empty(n, np.float32)
        kinds[name] = (value, out, rank.staged([value], [[out]]))
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
    for i in range(calls):
        # Runs of one kind, and changes.
        if i % 4 == 0:
            name = order.choice(names)
        elif i % 4 == 3:
            name = order.choice([one for one in names if one.startswith("tiny")])
        value, out, plan = kinds[name]
        value[:] = random_values(rank.rank, value.size, np.float32, i)
        naps()
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
    on_ranks(3, lambda rank: mixture(rank, 3, lambda: None, calls=60))


def test_a_call_that_did_not_take_place_leaves_no_trace():
    def body(rank):
        rank.together._wait_s = 0.001
        found = []
        for n in (3, 70_000):
            value, out = np.full(n, 100.0, np.float32), np.empty(n, np.float32)
            plan = rank.staged([value], [[out]])
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


# --- what it costs


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("n", [4096, TRUE_CHUNK // 2, 2 * TRUE_CHUNK])
def test_cost_of_large_values(p, n):
    """n(p-1)/p copied in and added, n copied out; in place n(p-1)/p added and copied; all in bytes."""

    def body(rank):
        value, out = np.zeros(n, np.float64), np.empty(n, np.float64)
        staged = rank.run(rank.staged([value], [[out]]))
        replicas = rank.replicas(n, value.dtype)
        in_place = rank.run(in_place_plan(rank.rank, [replicas]))
        return [(plan.copied_bytes, plan.added_bytes, len(plan.chunks)) for plan in (staged, in_place)]

    n_bytes = 8 * n
    part = n_bytes * (p - 1) // p
    expected = [(part + n_bytes, part, max(1, n_bytes // shared_plans.CHUNK_BYTES)), (part, part, 1)]
    assert on_ranks(p, body) == [expected] * p


def test_cost_of_tiny_values():
    def body(rank):
        value, out = np.zeros(100, np.float32), np.empty(100, np.float32)
        plan = rank.run(rank.staged([value], [[out]]))
        return plan.alone, plan.copied_bytes, plan.added_bytes

    assert on_ranks(4, body) == [(True, 800, 1200)] * 4
