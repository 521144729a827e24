"""Plans of direct calls for any arrays, and stores under any series of calls: no byte lost, the bits of plain sums."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from direct_stores import CALLS, both_ways, exchange, numbers
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv import optimizers
from mpikv.collectives.shared_plans import Interval, Region, cut, range_of
from mpikv.hostmemory.segment import aligned

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

KEYS = {"a": (3,), "b": (10, 10), "c": (5000,), "d": (), "e": (2, 0), "f": (90_000,)}
OPTIMIZERS = {"": {}, "sgd": {"learning_rate": 0.1, "momentum": 0.9}, "lamb": {}}
STEPS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=6, unique=True),  # the keys of a step
        st.booleans(),  # whether all workers make the same call, with the same kind of arrays
        st.lists(st.sampled_from(CALLS), min_size=4, max_size=4),  # the call of each worker, and its arrays
        st.lists(st.sampled_from(["own", "shared", "every other shared", "gaps", "new"]), min_size=4, max_size=4),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(45))
@given(
    st.sampled_from(["aa", "aaa", "aab", "abab"]),
    st.sampled_from(DTYPES),
    st.sampled_from([*OPTIMIZERS]),
    st.sampled_from(["thread", "calls"]),
    STEPS,
)
def test_any_series_of_calls(hosts, dtype, optimizer, progress, steps):
    """The bits of messages, also where some workers make other calls than others.

    On several hosts keys without memory go other ways, which add in other orders: there sums are exact.
    """
    dtype = "float32" if optimizer else dtype
    rounded = np.floor if "b" in hosts else np.array

    def body(store):
        keys = sorted(KEYS)
        store.init(keys, [np.full(KEYS[key], 0.5).astype(dtype) for key in keys])
        if optimizer:
            store.set_optimizer(optimizers.create(optimizer, **OPTIMIZERS[optimizer]))
        own, outs = ({key: np.zeros(KEYS[key], dtype) for key in keys} for _ in range(2))
        shared = dict(zip(keys, store.zeros([KEYS[key] for key in keys], dtype), strict=True))
        arrays = {"own": own, "shared": shared, "every other shared": {**own, **dict([*shared.items()][::2])}}
        # In one shared array, with less than a cache line between them.
        ends = [*accumulate(own[key].size + 2 for key in keys)]
        flat = store.zeros(ends[-1], dtype)
        arrays["gaps"] = {
            key: flat[end - 2 - own[key].size : end - 2].reshape(KEYS[key]) for key, end in zip(keys, ends, strict=True)
        }
        for i, (chosen, alike, calls, kinds) in enumerate(steps):
            rank = 0 if alike else store.rank
            held = arrays.get(kinds[rank]) or {key: np.zeros(KEYS[key], dtype) for key in keys}
            for j, key in enumerate(chosen):
                pushed = rounded(numbers(store, held[key].size, 10 * i + j) % 100)
                held[key][...] = pushed.reshape(KEYS[key]).astype(dtype)
            values = [held[key] for key in chosen]
            # Only one whole call meets another one whole: who makes single calls has the others do so, too.
            call = calls[rank] if alike or calls[rank] != "singles" else "async"
            exchange(store, call, chosen, values, [outs[key] for key in chosen])
            yield [values, store.pull(keys), flat]

    both_ways(len(hosts), body, direct=None, hosts=hosts if "b" in hosts else None, progress=progress)
