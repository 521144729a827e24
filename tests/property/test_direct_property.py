"""Plans of direct calls for any arrays, and stores under any series of calls: no byte lost, the bits of plain sums."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv.collectives.shared_plans import Interval, Region, cut, range_of
from mpikv.config import Config
from mpikv.hostmemory.segment import aligned
from mpikv.testing.reference import add
from mpikv.testing.stores import spawn_stores

DTYPES = ("float16", "float32", "float64", "int8", "int32")


@st.composite
def regions(draw):
    """Regions of several intervals; every element of a value is its number, so that one sees where it went."""
    made, number = [], 0
    for _ in range(draw(st.integers(0, 5))):
        dtype = np.dtype(draw(st.sampled_from(["int32", "int64"])))
        intervals = []
        for _ in range(draw(st.integers(1, 6))):
            n = draw(st.integers(1, 200) | st.integers(1, 5))
            value = None if draw(st.integers(0, 4)) == 0 else np.arange(number, number + n).astype(dtype)
            outs = tuple(np.zeros(n, dtype) for _ in range(draw(st.integers(0, 2))))
            intervals.append(Interval(n, value, outs if value is not None else ()))
            number += n
        made.append(Region(np.zeros(sum(interval.n_elems for interval in intervals), dtype), intervals))
    return made


@given(regions(), st.sampled_from([64, 128, 192, 512, 1 << 20]))
def test_cut_loses_nothing(made, limit_bytes):
    groups = cut(made, limit_bytes)
    for group in groups:
        assert group
        assert sum(aligned(region.result.nbytes) for region in group) <= limit_bytes
        for region in group:
            assert region.result.size == sum(interval.n_elems for interval in region.intervals) > 0
            begin = 0
            for interval in region.intervals:
                assert all(out.size == interval.n_elems for out in interval.outs)
                if interval.value is not None:
                    assert interval.value.size == interval.n_elems
                    region.result[begin : begin + interval.n_elems] = interval.value
                    for out in interval.outs:
                        out[:] = interval.value
                begin += interval.n_elems
    # Results and outs hold each value where it was in the region before, and nothing where a gap was.
    for region in made:
        begin = 0
        for interval in region.intervals:
            expected = np.zeros(interval.n_elems) if interval.value is None else interval.value
            np.testing.assert_array_equal(region.result[begin : begin + interval.n_elems], expected)
            for out in interval.outs:
                np.testing.assert_array_equal(out, expected)
            begin += interval.n_elems
    assert sum(region.result.size for group in groups for region in group) == sum(one.result.size for one in made)


@given(st.lists(st.integers(1, 40), max_size=30), st.sampled_from([64, 256]))
def test_cut_fills_groups(sizes, limit_bytes):
    """No two groups that follow each other would have fitted into one, so that small arrays share a chunk."""
    made = [Region(np.zeros(n, np.int8), [Interval(n, None, ())]) for n in sizes]
    used = [sum(aligned(region.result.nbytes) for region in group) for group in cut(made, limit_bytes)]
    assert all(a + b > limit_bytes for a, b in pairwise(used))


@given(st.integers(1, 9), st.integers(0, 3000), st.sampled_from([1, 2, 4, 8]))
def test_parts_cover_everything_in_whole_cache_lines(size, n_elems, itemsize):
    parts = [range_of(rank, size, n_elems, itemsize) for rank in range(size)]
    assert parts[0][0] == 0
    assert parts[-1][1] == n_elems
    line = 64 // itemsize
    for (_, end), (begin, _) in pairwise(parts):
        assert end == begin
        assert begin % line == 0 or begin == n_elems
    lines = [-(-(end - begin) // line) for begin, end in parts]
    assert max(lines) - min(lines) <= 1


# --- a store under any series of calls

KEYS = {"a": 3, "b": 100, "c": 5000, "d": 1}


@st.composite
def programs(draw):
    """Workers, dtype, and rounds: in each the keys in groups, and for each worker how it makes the calls."""
    workers = draw(st.integers(2, 3))
    rounds = []
    for _ in range(draw(st.integers(1, 6))):
        chosen = draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=4, unique=True))
        same = draw(st.booleans())
        how = draw(st.sampled_from(["list", "singles", "async", "push"]))
        hows = [how if same else draw(st.sampled_from(["list", "turned", "async", "push"])) for _ in range(workers)]
        arrays = [draw(st.sampled_from(["own", "shared", "new", "out"])) for _ in range(workers)]
        rounds.append((chosen, hows, arrays if draw(st.booleans()) else arrays[:1] * workers))
    return workers, draw(st.sampled_from(DTYPES)), rounds


def value_of(worker, round_, key, dtype):
    random = np.random.default_rng([worker, round_, ord(key)])
    return (random.standard_normal(KEYS[key]) * 30).astype(dtype)


@settings(max_examples=examples(60))
@given(programs())
def test_any_series_of_calls(program):
    workers, dtype, rounds = program

    def body(store):
        keys = sorted(KEYS)
        store.init(keys, [np.zeros(KEYS[key], dtype) for key in keys])
        own = {key: np.zeros(KEYS[key], dtype) for key in keys}
        outs = {key: np.zeros(KEYS[key], dtype) for key in keys}
        shared = dict(zip(keys, store.zeros([(KEYS[key],) for key in keys], dtype), strict=True))
        found = []
        for round_, (chosen, hows, arrays) in enumerate(rounds):
            how, kind = hows[store.rank], arrays[store.rank]
            order = chosen[::-1] if how == "turned" else chosen
            held = {"own": own, "shared": shared, "new": {key: np.empty(KEYS[key], dtype) for key in order}, "out": own}
            values = [held[kind][key] for key in order]
            for key, value in zip(order, values, strict=True):
                value[:] = value_of(store.rank, round_, key, dtype)
            targets = [outs[key] for key in order] if kind == "out" else values
            if how in ("list", "turned"):
                store.pushpull(order, values, targets)
            elif how == "singles":
                for key, value, target in zip(order, values, targets, strict=True):
                    store.pushpull(key, value, target)
            elif how == "async":
                requests = [store.pushpull_async(*one) for one in zip(order, values, targets, strict=True)]
                for request in requests:
                    request.wait()
            else:
                store.push(order, values)
                store.pull(order, targets)
            step = {key: target.tobytes() for key, target in zip(order, targets, strict=True)}
            found.append([step[key] for key in sorted(chosen)])
            found.append([store.pull(key).tobytes() for key in keys])
        return found

    values = {key: np.zeros(KEYS[key], dtype) for key in KEYS}
    expected = []
    for round_, (chosen, _, _) in enumerate(rounds):
        for key in chosen:
            values[key] = add([value_of(worker, round_, key, dtype) for worker in range(workers)])
        expected.append([values[key].tobytes() for key in sorted(chosen)])
        expected.append([values[key].tobytes() for key in sorted(KEYS)])
    assert spawn_stores("dist_sync", workers, body, config=Config(timeout_s=20.0)) == [expected] * workers
