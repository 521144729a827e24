"""Optimizers with every option that changes their formula, values that are hard to calculate with, and a space that
makes updates by programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpikv import optimizers
from mpikv.arrays import sum_dtype
from mpikv.optimizers import Optimizer
from mpikv.spaces.base import Formula
from mpikv.spaces.host import HostSpace
from mpikv.spaces.program import Numbers, Program
from mpikv.spaces.update_programs import Kind, update_stages

DTYPES = tuple(
    np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64)
)
COMMON: list[dict[str, Any]] = [
    {},
    {"rescale_grad": 0.3},
    {"wd": 0.01},
    {"clip_gradient": 0.5},
    {"rescale_grad": 0.3, "wd": 0.01, "clip_gradient": 0.5},
]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{}, {"momentum": 0.9}],
    "nag": [{}, {"momentum": 0.9}],
    "signum": [{}, {"momentum": 0.0}, {"wd_lh": 0.1}, {"momentum": 0.0, "wd_lh": 0.1}],
    "dcasgd": [{}, {"momentum": 0.9}],
    "adam": [{}, {"epsilon": 0.0}],
    "adamw": [{}, {"correct_bias": False}],
    "adagrad": [{}, {"eps": 0.0}],
    "rmsprop": [{}, {"clip_weights": 1.5}, {"centered": True}, {"centered": True, "epsilon": 0.0}],
    "adadelta": [{}, {"epsilon": 0.0}],
    "ftrl": [{}, {"lamda1": 0.0}],
    "test": [{}],
}
CASES = [(name, {**options, **common}) for name, all_ in OPTIONS.items() for options in all_ for common in COMMON]


def case_id(case: tuple[str, dict[str, Any]]) -> str:
    """For pytest."""
    return "-".join([case[0], *(f"{name}={value}" for name, value in case[1].items())])


def hard_values(n: int, dtype: np.dtype[Any], seed: int) -> np.ndarray:
    """(n,) of that dtype: for floats a third infinities, NaN, zeros of both signs, denormals, the largest and the like;
    for whole numbers a third the ends of the range."""
    numbers = np.random.default_rng(seed)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        values = numbers.integers(max(-100, limits.min), 100, n).astype(dtype)
        special = np.array([limits.min, limits.max, 0, 1, limits.max // 2 + 1], dtype)
    else:
        limits = ml_dtypes.finfo(dtype)
        values = (numbers.standard_normal(n) * 10.0 ** numbers.integers(-5, 3, n)).astype(dtype)
        least, largest, tiny = (float(one) for one in (limits.smallest_subnormal, limits.max, limits.tiny))
        listed = [0.0, 1.0, 0.5, least, 3 * least, tiny, tiny - least, largest, largest / 2, float("inf")]
        special = np.array([*listed, *(-one for one in listed), float("nan")]).astype(dtype)
    chosen = numbers.random(n) < 1 / 3
    return np.where(chosen, special[numbers.integers(0, special.size, n)], values)


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays have the same bits; one NaN is as good as another."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.dtype.kind in "iu":
        return np.array_equal(first, second)
    nan = np.isnan(first)
    bits = f"u{first.itemsize}"
    return np.array_equal(nan, np.isnan(second)) and np.array_equal(first[~nan].view(bits), second[~nan].view(bits))


class Run(NamedTuple):
    """One run of a program: what it was given, and what was in the arrays after it."""

    program: Program
    numbers: tuple[Any, ...]
    before: list[np.ndarray]
    after: list[np.ndarray]


def update_program(
    formula: Formula,
    weight: np.dtype[Any],
    terms: Sequence[np.dtype[Any]],
    arrays: Mapping[str, np.dtype[Any]],
    *,
    master: bool,
    dtype: np.dtype[Any],
    temporaries: int,
) -> tuple[Program, Numbers]:
    """Of an elementwise formula: its only stage."""
    kind = Kind(weight, tuple(terms), tuple(arrays.items()), master, dtype, temporaries)
    (stage,) = update_stages(formula, kind)
    return stage.program, stage.numbers


class ProgramSpace(HostSpace):
    """Host memory, with each update made by a program. runs: all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []

    def update(
        self,
        formula: Formula,
        weight: np.ndarray,
        terms: Sequence[np.ndarray],
        arrays: Mapping[str, np.ndarray],
        *,
        master: np.ndarray | None,
        dtype: np.dtype[Any],
        temporaries: int,
        elementwise: bool,
    ) -> None:
        """See `Space`."""
        assert elementwise
        program, numbers = update_program(
            formula,
            weight.dtype,
            [term.dtype for term in terms],
            {name: array.dtype for name, array in arrays.items()},
            master=master is not None,
            dtype=dtype,
            temporaries=temporaries,
        )
        all_arrays = [weight, *terms, *arrays.values(), *([] if master is None else [master])]
        before = [array.copy() for array in all_arrays]
        program.run(all_arrays, numbers)
        self.runs.append(Run(program, numbers, before, [array.copy() for array in all_arrays]))


N = 251
UPDATES = 2


def updated(optimizer: Optimizer, space: HostSpace, dtype: np.dtype[Any], n_terms: int = 1) -> list[np.ndarray]:
    """What some updates make of a weight and its state, from hard values."""
    object.__setattr__(optimizer, "_host", space)
    weight = hard_values(N, dtype, 0)
    state = optimizer.init(weight)
    for i, value in enumerate(state.values()):
        if isinstance(value, np.ndarray):
            value[...] = hard_values(N, value.dtype, 100 + i)
    for t in range(UPDATES):
        terms = [hard_values(N, sum_dtype(dtype), 10 * t + 1 + i) for i in range(n_terms)]
        state = optimizer.update_sum("w", weight, terms, state)
    return [weight, *(value for value in state.values() if isinstance(value, np.ndarray))]


def update_runs(dtype: np.dtype[Any]) -> list[Run]:
    """Updates of every optimizer with weights of that dtype, also with a master and with several terms."""
    space = ProgramSpace()
    for name, options in CASES:
        updated(optimizers.create(name, **options), space, dtype)
    updated(optimizers.create("adam"), space, dtype, n_terms=3)
    if dtype.itemsize == 2:
        for name in ("sgd", "adam"):
            updated(optimizers.create(name, multi_precision=True), space, dtype, n_terms=2)
    return space.runs
