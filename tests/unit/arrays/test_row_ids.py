"""Ids of rows: merged in the order given, and written in the fewest bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from grids import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpikv.arrays import row_ids
from mpikv.errors import MpikvError

F32 = np.dtype(np.float32)


def by_loop(ids, rows, wide):
    """What `merge` means: a dense sum, row after row."""
    sums = {}
    for i, row in zip(ids.tolist(), rows, strict=True):
        sums[i] = row.astype(wide) if i not in sums else sums[i] + row.astype(wide)
    ordered = sorted(sums)
    stacked = np.array([sums[i] for i in ordered]).reshape(len(ordered), *rows.shape[1:])
    return ordered, stacked.astype(rows.dtype)


@settings(max_examples=examples(150), deadline=None)
@example(ids=[7, 3] * 3 * row_ids.PASSES, columns=2, dtype=np.float32, seed=0)  # rows that come very often
@given(
    ids=st.lists(st.integers(0, 12), max_size=40),
    columns=st.integers(0, 3),
    dtype=st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.int8]),
    seed=st.integers(0, 99),
)
def test_merge_is_the_sum_in_the_order_given(ids, columns, dtype, seed):
    ids = np.array(ids, np.int64)
    rows = np.random.default_rng(seed).normal(0, 40, (ids.size, columns)).astype(dtype)
    wide = np.dtype(np.int8) if dtype is np.int8 else F32
    found_ids, found = row_ids.merge(ids, rows, wide)
    expected_ids, expected = by_loop(ids, rows, wide)
    assert found_ids.tolist() == expected_ids
    assert found.dtype == rows.dtype
    assert found.tobytes() == expected.tobytes()


@settings(max_examples=examples(90), deadline=None)
@given(first=st.sets(st.integers(0, 15)), second=st.sets(st.integers(0, 15)), seed=st.integers(0, 99))
def test_add_is_the_dense_sum(first, second, seed):
    rng = np.random.default_rng(seed)
    ids = [np.array(sorted(some), np.int64) for some in (first, second)]
    rows = [rng.normal(size=(one.size, 2)).astype(np.float32) for one in ids]
    dense = [np.zeros((16, 2), np.float32) for _ in ids]
    for one, at, values in zip(dense, ids, rows, strict=True):
        one[at] = values
    union, total = row_ids.add(ids[0], rows[0].copy(), ids[1], rows[1])
    assert union.tolist() == sorted(first | second)
    assert total.tobytes() == (dense[0] + dense[1])[union].tobytes()


@settings(max_examples=examples(150), deadline=None)
@given(n_rows=st.integers(0, 300), data=st.data())
def test_what_is_written_is_read(n_rows, data):
    ids = np.array(sorted(data.draw(st.sets(st.integers(0, max(n_rows - 1, 0)), max_size=n_rows))), np.int64)
    ids = ids[ids < n_rows]
    written = row_ids.encode(ids, n_rows)
    assert written.nbytes % row_ids.ALIGN_BYTES == 0
    behind = np.arange(5, dtype=np.uint8)
    found, rest = row_ids.decode(np.concatenate([np.zeros(3, np.uint8), written, behind])[3:], n_rows)
    assert found.tolist() == ids.tolist()
    assert rest.tolist() == behind.tolist()


@pytest.mark.parametrize(
    ("n_rows", "n_ids", "form", "n_bytes"),
    [
        (64, 0, row_ids.SHORT, 0),
        (64, 1, row_ids.SHORT, 16),  # padded
        (64, 3, row_ids.BITS, 16),
        (64, 64, row_ids.ALL, 0),
        (10_000_000, 1000, row_ids.SHORT, 4000),
        (10_000_000, 400_000, row_ids.BITS, 1_250_000),
        (10_000_000, 10_000_000, row_ids.ALL, 0),
        (1 << 40, 1000, row_ids.LONG, 8000),
    ],
)
def test_the_shortest_form(n_rows, n_ids, form, n_bytes):
    written = row_ids.encode(np.arange(n_ids), n_rows)
    assert (written[8], written.nbytes) == (form, 16 + n_bytes)
    assert np.array_equal(row_ids.decode(written, n_rows)[0], np.arange(n_ids))


def test_damaged_ids_are_an_error():
    good = row_ids.encode(np.array([1, 5, 6]), 100)
    unsorted, outside, form, longer = (good.copy() for _ in range(4))
    unsorted[16:20], outside[24:28] = [9, 0, 0, 0], [100, 0, 0, 0]
    form[8], longer[0] = 9, 200
    for bad in (good[:10], good[:20], unsorted, outside, form, longer):
        with pytest.raises(MpikvError, match="damaged ids of rows"):
            row_ids.decode(bad, 100)
    bits = row_ids.encode(np.arange(90), 100)
    bits[0] = 89
    with pytest.raises(MpikvError, match="89 of 100 rows"):
        row_ids.decode(bits, 100)
