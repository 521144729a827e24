"""Sums of squares, and formulas that ask for norms, on both kinds of arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fake_cupy import Machine

from mpikv import optimizers
from mpikv.optimizers.norms import norm
from mpikv.spaces.folded import BLOCK_ELEMS, sum_of_squares

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 272, 4096, 4097, 16 * BLOCK_ELEMS + 16 * 5 + 3]


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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lamb", {}),
        ("lamb", {"wd": 0.1, "lower_bound": 2.0, "upper_bound": 3.0, "clip_gradient": 0.3, "rescale_grad": 0.5}),
        ("lamb", {"bias_correction": False}),
        ("lars", {}),
        ("lars", {"momentum": 0.9, "wd": 0.1, "eta": 0.5, "rescale_grad": -0.5}),
        ("lars", {"momentum": 0.9, "clip_gradient": 0.3, "eps": 0.1}),
    ],
)
@pytest.mark.parametrize("key", ["w", "bias", "zeros"])
def test_formulas_wait_for_nothing(name: str, options: dict[str, Any], key: str) -> None:
    """Also of keys without a norm: of zeros, and those that LARS leaves out."""
    machine, optimizer = Machine(), optimizers.create(name, **options)
    cupy, weight = machine.process(), values_of(273, np.float32) * np.float32(key != "zeros")
    state = optimizer.init(weight)
    arrays = {part: array.copy() for part, array in state.items() if isinstance(array, np.ndarray)}
    rows = [weight, values_of(300, np.float32)[:273], np.zeros_like(weight), np.zeros_like(weight)]
    step = optimizers.Step(key, 1, 0.5, wd=0.1, global_rate=0.5, real=np.float32, shape=(273,), state={**state})
    there, arrays_there = [cupy.asarray(one) for one in rows], {one: cupy.asarray(arrays[one]) for one in arrays}
    before = [machine.counts[one] for one in ("syncs", "gets", "sets")]
    optimizer.formula(step._replace(state={**state}), there[0], there[1], arrays_there, there[2:])
    assert [machine.counts[one] for one in ("syncs", "gets", "sets")] == before
    with np.errstate(all="ignore"):
        optimizer.formula(step, rows[0], rows[1], arrays, rows[2:])
    for here, on_gpu in [(rows[0], there[0]), *((arrays[one], arrays_there[one]) for one in arrays)]:
        np.testing.assert_allclose(on_gpu.get(), here, rtol=1e-6)
