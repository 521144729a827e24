"""Sums of squares, on both kinds of arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fake_cupy import Machine

from mpikv.optimizers.norms import norm
from mpikv.spaces.folded import BLOCK_ELEMS, sum_of_squares

LENGTHS = [1, 15, 16, 17, 31, 257, 4097, 16 * BLOCK_ELEMS + 16 * 5 + 3]


def values_of(n: int, dtype: Any) -> np.ndarray:
    rng = np.random.default_rng(n)
    return (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", LENGTHS)
def test_a_number_near_the_exact_one(n: int, dtype: Any) -> None:
    """On a GPU it is not waited for."""
    machine, values = Machine(), values_of(n, dtype)
    on_gpu = machine.process().asarray(values)
    wide = values.astype(np.float64)
    found = sum_of_squares(on_gpu)
    assert (found.shape, found.dtype) == ((), np.float64)
    assert not machine.counts["gets"]
    for one in (sum_of_squares(values), found.get()):
        assert math.isclose(one, math.fsum(wide * wide), rel_tol=1e-14)
    assert on_gpu.get().tobytes() == values.tobytes()


def test_nothing_and_what_is_no_number() -> None:
    cupy = Machine().process()
    for make in (np.asarray, cupy.asarray):
        assert float(sum_of_squares(make(np.empty(0, np.float32)))) == 0.0
        assert math.isnan(sum_of_squares(make(np.array([1.0, np.nan]))))
        assert float(sum_of_squares(make(np.array([1.0, -np.inf])))) == math.inf
        assert float(norm(make(np.array([3.0, 4.0], np.float32)))) == 5.0
