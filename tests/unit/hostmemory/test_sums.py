"""The sum within a host against plain loops, bit for bit: the order, rounding, NaN and -0.0, other units."""

from __future__ import annotations

from functools import reduce

import ml_dtypes
import numpy as np
import pytest

from mpikv.arrays.reductions import OF_GROUPS
from mpikv.hostmemory.sums import adder_of, in_order, newest_first

NARROW = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
SIZES = (1, 2, 3, 8)
# Quiet NaNs whose other bits say which array they are from.
NANS = [np.full(16, 0x7FC00000 + i, np.uint32).view(np.float32) for i in range(1, 5)]


def terms(n: int, count: int, dtype=np.float32) -> list[np.ndarray]:
    numbers = np.random.default_rng([n, count])
    return [(numbers.standard_normal(n) * 10.0 ** numbers.integers(-2, 3, n)).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("where", ["apart", "first"])
def test_one_after_another(count, where):
    sources = terms(1001, count)
    expected = reduce(np.add, sources)
    before = [source.copy() for source in sources]
    out = sources[0] if where == "first" else np.full(1001, np.nan, np.float32)
    in_order(out, sources)
    assert out.tobytes() == expected.tobytes()
    for source, old in zip(sources[where == "first" :], before[where == "first" :], strict=True):
        assert source.tobytes() == old.tobytes()
    out = np.empty(1001, np.float32)
    in_order(out, before, newest_first(np.add))
    assert out.tobytes() == reduce(lambda total, one: np.add(one, total), before).tobytes()


def test_which_nan_it_is():
    """What NumPy makes of two NaNs depends on which comes first: the same calls, the same bits."""
    expected, turned = np.empty((2, 16), np.float32)
    np.add(NANS[0], NANS[1], out=expected)
    np.add(NANS[1], NANS[0], out=turned)
    for nan in NANS[2:]:
        np.add(expected, nan, out=expected)
        np.add(nan, turned, out=turned)
    out = np.empty(16, np.float32)
    in_order(out, NANS)
    assert out.tobytes() == expected.tobytes()
    in_order(out, NANS, newest_first(np.add))
    assert out.tobytes() == turned.tobytes()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("count", SIZES)
def test_short_floats_are_rounded_once_or_not_at_all(dtype, count):
    sources = terms(501, count, dtype)
    wide = reduce(np.add, [source.astype(np.float32) for source in sources])
    for out_dtype in (np.dtype(np.float32), dtype):
        out = np.empty(501, out_dtype)
        adder_of(dtype)(out, sources)
        assert out.tobytes() == wide.astype(out_dtype).tobytes()
    adder_of(dtype)(sources[0], sources)
    assert sources[0].tobytes() == wide.astype(dtype).tobytes()


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "uint8", "bool"])
@pytest.mark.filterwarnings("ignore:overflow")  # products of float16
def test_what_a_reduction_makes(name, dtype):
    found, one = np.dtype(getattr(ml_dtypes, dtype, dtype)), OF_GROUPS[name]
    if ("f" if dtype == "bfloat16" else found.kind) not in one.kinds:
        return
    sources = terms(33, 3, found)
    exact = np.dtype(np.float32) if found in NARROW else found
    expected = reduce(one.combine, [source.astype(exact) for source in sources])
    expected = (np.divide(expected, exact.type(3)) if one.is_mean else expected).astype(found)
    adder_of(found, one)(out := np.empty(33, found), sources)
    assert out.tobytes() == expected.tobytes()
