"""The programs of the store's own arithmetic: copies, sums, factors. Arguments are in the order of the words in each
first line.

Cost: each is traced once, for the dtypes and the number of arrays that it is made for.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mpikv.arrays import sum_dtype
from mpikv.spaces.program import Program
from mpikv.spaces.tracing import trace

KEPT = 1024
"""Programs that are kept: more than a store has pairs of dtypes and numbers of workers."""


@functools.lru_cache(KEPT)
def copy_program(source: np.dtype[Any], to: np.dtype[Any]) -> Program:
    """source, out: a copy, cast as `np.copyto(..., casting="unsafe")` does it."""
    return trace(lambda values, out: np.copyto(out, values, casting="unsafe"), [source, to])[0]


@functools.lru_cache(KEPT)
def fill(dtype: np.dtype[Any]) -> Program:
    """out: one number in all of it."""
    return trace(lambda out: np.copyto(out, dtype.type(0)), [dtype])[0]


@functools.lru_cache(KEPT)
def combine(how: np.ufunc, dtype: np.dtype[Any]) -> Program:
    """first, second, out, which may be one of them: `how(first, second, out=out)`."""
    return trace(lambda first, second, out: how(first, second, out=out), [dtype] * 3)[0]


@functools.lru_cache(KEPT)
def scale(dtype: np.dtype[Any]) -> Program:
    """values, out, which may be the same: the values times one number, of their dtype."""
    return trace(lambda values, out: np.multiply(values, dtype.type(1), out=out), [dtype] * 2)[0]


@functools.lru_cache(KEPT)
def divide(dtype: np.dtype[Any]) -> Program:
    """values, out, which may be the same: the values divided by one number. NotAProgram for whole numbers."""
    return trace(lambda values, out: np.divide(values, dtype.type(1), out=out), [dtype] * 2)[0]


@functools.lru_cache(KEPT)
def squares_in_order(n: int, dtype: np.dtype[Any]) -> Program:
    """n sources, of this dtype, out, of float64: the sum of their squares, in float64 and in their order."""

    def total(*arrays: Any) -> None:
        *sources, out = arrays
        for i, source in enumerate(sources):
            wide = source.astype(np.float64)
            np.copyto(out, wide * wide if i == 0 else out + wide * wide)

    return trace(total, [*[dtype] * n, np.dtype(np.float64)])[0]


@functools.lru_cache(KEPT)
def sum_in_order(
    n: int,
    dtype: np.dtype[Any],
    to: np.dtype[Any],
    *,
    scaled: tuple[int, ...] = (),
    how: np.ufunc = np.add,
    mean: bool = False,
) -> Program:
    """n sources, out, which may be the first of them: their sum, as `hostmemory.sums.way_of` makes it.

    dtype: that of the sources; they are combined by `how` in `sum_dtype(dtype)`, in their order. to: that of `out`.
    scaled: which sources are multiplied by a number first, in their dtype; the numbers come in the order of the
    sources. mean: the result is divided by one more number, the last.
    """
    wide = sum_dtype(dtype)

    def total(*arrays: Any) -> None:
        *sources, out = arrays
        for i in sorted(scaled):
            sources[i] = sources[i] * dtype.type(1)
        result = sources[0].astype(wide)
        for source in sources[1:]:
            result = how(result, source, dtype=wide)
        if mean:
            np.divide(result, wide.type(1), out=result)
        np.copyto(out, result, casting="unsafe")

    return trace(total, [*[dtype] * n, to])[0]
