"""A traced program, run by NumPy, does what the function that it was traced from does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from program_cases import CASES, DTYPES, ProgramSpace, case_id, hard_values, same_bits, update_program, updated

from mpikv import optimizers
from mpikv.arrays import sum_dtype
from mpikv.hostmemory import sums
from mpikv.reductions import REDUCTIONS
from mpikv.spaces import arithmetic
from mpikv.spaces.host import HostSpace
from mpikv.spaces.program import Argument, Program
from mpikv.spaces.tracing import NotAProgram, trace

FLOAT32, FLOAT64, FLOAT16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
INT8, INT32 = np.dtype(np.int8), np.dtype(np.int32)
N = 97


# --- updates


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_an_update(case: tuple[str, dict[str, Any]], dtype: np.dtype[Any]) -> None:
    name, options = case
    expected = updated(optimizers.create(name, **options), HostSpace(), dtype)
    space = ProgramSpace()
    found = updated(optimizers.create(name, **options), space, dtype)
    assert all(map(same_bits, found, expected))
    assert len(found) == len(expected)
    first, second = (run.program for run in space.runs)
    assert first == second  # the state's count of updates is in the numbers alone
    assert hash(first) == hash(second)


@pytest.mark.parametrize("n_terms", [1, 2, 5])
@pytest.mark.parametrize("master", [False, True], ids=["", "master"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_update_with_several_terms(dtype: np.dtype[Any], master: bool, n_terms: int) -> None:
    def run(space: HostSpace) -> list[np.ndarray]:
        return updated(optimizers.create("nag", momentum=0.9, wd=0.1, multi_precision=master), space, dtype, n_terms)

    expected, found = run(HostSpace()), run(ProgramSpace())
    assert all(map(same_bits, found, expected))
    assert len(found) == len(expected) == 2 + (master and dtype.itemsize == 2)


@pytest.mark.parametrize("term_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_terms_of_any_dtype(dtype: np.dtype[Any], term_dtype: np.dtype[Any]) -> None:
    """They are added in their own dtype, where whole numbers wrap around and narrow ones are rounded."""

    def run(space: HostSpace) -> np.ndarray:
        optimizer = optimizers.create("sgd", learning_rate=0.5)
        object.__setattr__(optimizer, "_host", space)
        weight = hard_values(N, dtype, 1)
        terms = [hard_values(N, term_dtype, 2 + i) for i in range(3)]
        optimizer.update_sum("w", weight, terms, optimizer.init(weight))
        return weight

    assert same_bits(run(ProgramSpace()), run(HostSpace()))


@pytest.mark.parametrize(
    "changes",
    [{"learning_rate": 0.7}, {"wd": 0.3}, {"rescale_grad": 0.2}, {"clip_gradient": 2.0}, {"beta1": 0.5}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_changed_number_leaves_the_program_equal(changes: dict[str, float]) -> None:
    start = {"learning_rate": 0.1, "wd": 0.1, "rescale_grad": 0.5, "clip_gradient": 1.0}
    runs = []
    for options in (start, {**start, **changes}):
        space = ProgramSpace()
        updated(optimizers.create("adam", **options), space, FLOAT32)
        runs.append(space.runs[0])
    assert runs[0].program == runs[1].program
    assert hash(runs[0].program) == hash(runs[1].program)
    assert runs[0].numbers != runs[1].numbers
    assert [type(number) for number in runs[0].numbers] == [np.float32] * len(runs[0].program.numbers)


def test_different_formulas_are_different_programs() -> None:
    found = set()
    for name, options in CASES:
        space = ProgramSpace()
        updated(optimizers.create(name, **options), space, FLOAT32)
        found.add(space.runs[0].program)
    # Those with and without an epsilon, a bound or a correction that is only a number are the same.
    assert len(found) > 30
    assert {len(one.arguments) for one in found} == {2, 3, 4, 5}


def test_what_is_only_read_is_not_written() -> None:
    space = ProgramSpace()
    updated(optimizers.create("adam", multi_precision=True), space, FLOAT16, n_terms=2)
    weight, first, second, mean, var, master = space.runs[0].program.arguments
    assert weight.first is None  # the master is read in its place
    assert weight.last is not None
    assert first.last is second.last is None
    assert None not in (mean.first, mean.last, var.first, var.last, master.first, master.last)


def test_what_a_formula_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="learning rate 0"):
        updated(optimizers.create("ftrl", learning_rate=0.0), ProgramSpace(), FLOAT32)


# --- what a function may do


def several_ways(w: Any, g: Any) -> None:
    """In place, into new arrays, with numbers of NumPy and Python on both sides."""
    other = 2 * g - np.float32(0.25) * w
    other /= 3
    w[...] = other + w**2
    w -= np.square(g).astype(np.float32)
    np.copyto(g, np.abs(-w))
    g[:] = np.sqrt(g).copy()
    g *= np.asarray(0.5, np.float32)
    w += np.subtract(1, np.sign(w), dtype=np.float32)
    w += np.negative(w, out=w) * w


def fills(w: Any, g: Any) -> None:
    g.fill(3)
    w[...] = 0.1
    np.copyto(g, g * w)
    w += g


def unused(w: Any, g: Any) -> None:
    np.multiply(w, g) * 17.0
    w += 1.0
    w *= g
    w[...] = g


def swap(w: Any, g: Any) -> None:
    old = w.copy()
    w[...] = g
    g[...] = old


def mixed(w: Any, g: Any) -> None:
    """Dtypes are NumPy's affair."""
    w[...] = w.astype(np.float64) * g.astype(np.float16) + np.float64(0.1)
    g -= g.astype(np.int8).astype(np.float16) * 3


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64, FLOAT16], ids=str)
@pytest.mark.parametrize("function", [several_ways, fills, unused, swap, mixed], ids=lambda one: one.__name__)
def test_a_function(function: Callable[..., None], dtype: np.dtype[Any]) -> None:
    values = np.random.default_rng(1).standard_normal((2, N)).astype(dtype)
    expected, found = values.copy(), values.copy()
    with np.errstate(all="ignore"):
        function(*expected)
    traced, numbers = trace(function, [dtype] * 2)
    traced.run(list(found), numbers)
    assert same_bits(found, expected)


def test_whole_numbers() -> None:
    def function(w: Any, g: Any) -> None:
        w += g * 2
        w -= np.negative(np.absolute(g))
        g[...] = w / g
        w *= np.sign(w)
        np.maximum(w, g, out=w)

    values = hard_values(2 * N, INT8, 3).reshape(2, N)
    values[1][values[1] == 0] = 1
    expected, found = values.copy(), values.copy()
    with np.errstate(all="ignore"):
        function(*expected)
    traced, numbers = trace(function, [INT8] * 2)
    traced.run(list(found), numbers)
    assert np.array_equal(found, expected)


def test_dead_values_are_dropped() -> None:
    traced, numbers = trace(unused, [FLOAT32] * 2)
    assert traced == arithmetic.copy_program(FLOAT32, FLOAT32)._replace(
        arguments=tuple(reversed(arithmetic.copy_program(FLOAT32, FLOAT32).arguments))
    )
    assert not numbers
    assert not traced.operations
    assert traced.dtypes() == [FLOAT32]


def test_nothing_done_is_nothing_written() -> None:
    traced, _ = trace(np.add, [FLOAT32] * 2)
    assert traced == Program((Argument(FLOAT32, None, None),) * 2, (), ())


def _use(name: str) -> Callable[[Any], Any]:
    return lambda a: getattr(a, name)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (np.sum, "np.sum"),
        (np.add.reduce, "np.add.reduce"),
        (np.exp, "np.exp"),
        (lambda a: np.where(a, 1, 2), "np.where"),
        (lambda a: np.add.at(a, 0, 1), "np.add.at"),
        (lambda a: a[0], "part of an array"),
        (lambda a: a.__setitem__(slice(1, 2), 1.0), "part of an array"),
        (lambda a: a.__setitem__(None, 1.0), "part of an array"),
        (bool, "truth"),
        (len, "length"),
        (list, "elements"),
        (float, "value"),
        (int, "value"),
        (np.asarray, "__array"),
        (lambda a: a == 1, "comparison"),
        (lambda a: np.float32(1) < a, "less|greater|comparison"),
        (lambda a: a**3, "power"),
        (lambda a: np.add(a, a, where=[True]), "where"),
        (lambda a: np.copyto(a, 1, where=[True]), "some elements"),
        (lambda a: a + np.ones(3, np.float32), "ndarray"),
        (lambda a: np.copyto(np.ones(3, np.float32), a), "ndarray"),
        (lambda a: np.add(a, a, out=np.ones(3, np.float32)), "ndarray"),
        (lambda a: np.add(a, a.astype(np.float64), out=a, casting="no"), "cast"),
        (lambda a: a + 1j, "complex"),
        (lambda a: a + "x", "add"),
        (lambda a: a + object(), "object"),
        (lambda a: np.copyto(a.astype(np.int8), 0.5), "same_kind"),
        (lambda a: a.astype(np.complex64), "complex64"),
        (_use("size"), "`size`"),
        (_use("shape"), "`shape`"),
        (_use("sum"), "`sum`"),
        (lambda a: trace(lambda other: other + a, [FLOAT32]), "another trace"),
    ],
)
def test_what_cannot_be_noted(function: Callable[[Any], Any], said: str) -> None:
    def traced(array: Any) -> None:
        array += function(array)

    with pytest.raises(NotAProgram, match=said):
        trace(traced, [FLOAT32])


def test_temporary_memory_that_is_read_before_it_is_written() -> None:
    def formula(w: Any, g: Any, arrays: Any, tmp: Any) -> None:
        w += tmp[0]

    with pytest.raises(NotAProgram, match="before it is written"):
        update_program(formula, FLOAT32, [FLOAT32], {}, master=False, dtype=FLOAT32, temporaries=1)


def test_a_cast_that_numpy_refuses() -> None:
    def formula(w: Any) -> None:
        w /= 2

    with pytest.raises(NotAProgram, match="float64 cast to int32"):
        trace(formula, [INT32])


# --- the store's own arithmetic


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_copies(source: np.dtype[Any], to: np.dtype[Any]) -> None:
    values, expected, found = hard_values(N, source, 4), np.zeros(N, to), np.zeros(N, to)
    with np.errstate(all="ignore"):
        HostSpace().copy(expected, values)
    made = arithmetic.copy_program(source, to)
    made.run([values, found], [])
    assert same_bits(found, expected)
    assert arithmetic.copy_program(source, to) is made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fills(dtype: np.dtype[Any]) -> None:
    found, expected = np.zeros(N, dtype), np.full(N, 7, dtype)
    arithmetic.fill(dtype).run([found], [7])
    assert same_bits(found, expected)


@pytest.mark.parametrize("how", [np.add, np.minimum, np.maximum, np.multiply], ids=lambda how: how.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combines(dtype: np.dtype[Any], how: np.ufunc) -> None:
    first, second, found = hard_values(N, dtype, 5), hard_values(N, dtype, 6), np.zeros(N, dtype)
    expected = found.copy()
    with np.errstate(all="ignore"):
        HostSpace().combine(first, second, expected, how)
    made = arithmetic.combine(how, dtype)
    made.run([first, second, found], [])
    assert same_bits(found, expected)
    made.run([first, second, first], [])
    assert same_bits(first, expected)


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one.kind not in "iu"], ids=str)
def test_scales_and_divides(dtype: np.dtype[Any]) -> None:
    values, found = hard_values(N, dtype, 7), np.zeros(N, dtype)
    expected = found.copy()
    with np.errstate(all="ignore"):
        HostSpace().scale(values, 1 / 3, expected)
        arithmetic.scale(dtype).run([values, found], [1 / 3])
        assert same_bits(found, expected)
        REDUCTIONS["mean"].finish(expected, 3)
    arithmetic.divide(dtype).run([found, found], [3])
    assert same_bits(found, expected)


def test_whole_numbers_are_not_divided() -> None:
    with pytest.raises(NotAProgram):
        arithmetic.divide(INT32)


@pytest.mark.parametrize("op", REDUCTIONS.values(), ids=lambda op: op.name)
@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("dtype", "to"),
    [*((one, one) for one in DTYPES), (FLOAT32, FLOAT16), (FLOAT16, FLOAT32), (FLOAT32, np.dtype(ml_dtypes.bfloat16))],
    ids=str,
)
def test_sums(dtype: np.dtype[Any], to: np.dtype[Any], n: int, op: Any) -> None:
    """As workers on one host make them; some of the workers' arrays are scaled before."""
    if op.is_mean and dtype.kind in "iu":
        op = REDUCTIONS["sum"]  # whole numbers have no mean
    ratios = dict.fromkeys(range(0, n, 2), 0.3) if dtype.kind not in "iu" else {}
    sources = [hard_values(N, dtype, 20 + i) for i in range(n)]
    expected, found = np.zeros(N, to), np.zeros(N, to)
    way = sums.way_of(dtype, op.combine, op.finish if op.is_mean else None)
    with np.errstate(all="ignore"):
        scaled = [sums.scaled(source, ratios.get(i, 1.0)) for i, source in enumerate(sources)]
        if to == dtype or sum_dtype(dtype) != dtype:
            way(expected, scaled)
        else:  # in the dtype of the sources, and then rounded
            total = scaled[0].copy()
            way(total, scaled)
            expected[...] = total
    made = arithmetic.sum_in_order(n, dtype, to, scaled=tuple(ratios), how=op.combine, mean=op.is_mean)
    made.run([*sources, found], [*ratios.values(), *([n] if op.is_mean else [])])
    assert same_bits(found, expected)
