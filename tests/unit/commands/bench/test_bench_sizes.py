"""Sizes and exact values of the benchmark."""

from __future__ import annotations

import argparse
from fractions import Fraction

import numpy as np
import pytest
from fake_cupy import Machine

import mpikv.arrays.as_numpy  # noqa: F401 - bfloat16
from mpikv.commands.bench.pattern import EXACT, GpuPattern, Pattern
from mpikv.commands.bench.session import sweep
from mpikv.commands.numbers import short, size
from mpikv.spaces.gpu import Gpu


@pytest.mark.parametrize(
    ("text", "n_bytes", "printed"),
    [
        ("4", 4, "4"),
        ("64k", 65536, "64K"),
        ("256MiB", 1 << 28, "256M"),
        ("1.5K", 1536, "1536"),
        ("2 GB", 2 << 30, "2G"),
        (" 8 ", 8, "8"),
    ],
)
def test_sizes(text: str, n_bytes: int, printed: str) -> None:
    assert size(text) == n_bytes == size(printed)
    assert short(n_bytes) == printed


@pytest.mark.parametrize("text", ["", "x", "-4", "0", "1.5", "4T", "1e6", "K", "4 4"])
def test_other_texts_are_errors(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="bytes"):
        size(text)


def test_sweep() -> None:
    assert sweep(4, 1024, 4) == [4, 16, 64, 256, 1024]
    assert sweep(4, 1023, 4) == [4, 16, 64, 256]
    assert sweep(1, 16, 8) == [8, 16]  # whole elements, each size once
    assert sweep(5, 5, 2) == [6]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_sum_is_exact_in_any_order(dtype: str, size: int) -> None:
    """Against a sum in exact fractions, and every partial sum is a number that the dtype holds."""
    patterns = [Pattern(np.dtype(dtype), rank, size) for rank in range(size)]
    arrays = [np.empty(40_000, dtype) for _ in range(size)]
    for pattern, array in zip(patterns, arrays, strict=True):
        pattern.fill(array)
    wanted = [sum(Fraction(float(array[i])) for array in arrays) for i in (*range(30), 39_999)]
    total = arrays[-1].copy()
    for array in arrays[-2::-1]:
        total = (total + array).astype(dtype)
    assert [Fraction(float(total[i])) for i in (*range(30), 39_999)] == wanted
    assert all(pattern.is_total(total) for pattern in patterns)
    assert patterns[0].is_total(total.reshape(200, 200))
    assert max(wanted) <= EXACT.get(dtype, 1 << 31)


def test_one_wrong_element_is_found() -> None:
    pattern = Pattern(np.dtype(np.float32), 0, 1)
    array = np.empty(100_001, np.float32)
    pattern.fill(array)
    for place in (0, 50_000, 100_000):
        array[place] += 1
        assert not pattern.is_total(array)
        array[place] -= 1
        assert pattern.is_total(array)
    assert not pattern.is_total(np.roll(array, 1))  # the right numbers at wrong places


def test_too_many_ranks_for_a_dtype() -> None:
    with pytest.raises(ValueError, match="200 ranks cannot be checked in bfloat16"):
        Pattern(np.dtype("bfloat16"), 0, 200)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_on_a_gpu(dtype: str) -> None:
    pattern = GpuPattern(Gpu(0, Machine().process(), lambda _: True), np.dtype(dtype), 0, 1)
    array = pattern.zeros((2, 50))
    assert array.get().tobytes() == bytes(array.nbytes)
    for sign in (1, -1, 0, 1):
        pattern.fill(array, sign)
        pattern.finish()
        assert pattern.is_total(array, sign)
        assert not pattern.is_total(array, sign + 1)
    assert pattern.is_total(array.get())  # what a pull of a key in host memory returns
    array[1, 49:] = 0
    assert not pattern.is_total(array)
