"""What a codec has to do, as checks that you can make of your own: `check_codec(YourCodec())`.

Each check is a function by itself, which raises AssertionError with a text that says what is wrong, for which values.
They need no test framework, and together they take less than a second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import BFLOAT16, HostArray, sum_dtype
from mpikv.codecs import registry
from mpikv.codecs.base import Codec, State
from mpikv.codecs.error_feedback import ErrorFeedback
from mpikv.errors import MpikvError

LENGTHS = (0, 1, 2, 7, 8, 9, 100, 257, 1000)
DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16)
PUSHES, THREADS = 3, 4
FLOAT32 = np.dtype(np.float32)
_ROUNDING = Fraction(1, 1 << 24)  # of float32: half a unit of the last of its 24 bits
_LEAST = Fraction(1, 1 << 150)  # half of the smallest float32


def check_codec(codec: Codec, names: Mapping[str, Any] | None = None) -> None:
    """Make all checks. names: what stands for names in `repr(codec)`, besides the registered codecs and its class.

    Raises AssertionError.

    >>> from mpikv import codecs
    >>> from mpikv.testing.codecs import check_codec
    >>> check_codec(codecs.create({'type': 'topk', 'ratio': 0.1}))
    """
    check_value(codec, names)
    for check in CHECKS:
        check(codec)


def check_value(codec: Codec, names: Mapping[str, Any] | None = None) -> None:
    """It is a frozen dataclass; `repr` makes it again, and so does the registry of its parameters where it is known."""
    cls = type(codec)
    _require(isinstance(codec, Codec), f"{cls.__name__} is not derived from mpikv.codecs.Codec")
    _require(is_dataclass(codec), f"{cls.__name__} is no dataclass")
    _require(hash(codec) == hash(codec), f"{codec!r} has no hash: make it a frozen dataclass")
    text = repr(codec)
    classes: list[type[Codec]] = [*registry.classes(), ErrorFeedback, cls]
    ours = {one.__name__: one for one in classes}
    again = eval(text, {**ours, **(names or {})})
    _require(again == codec, f"repr is {text}, which makes {again!r}: not equal")
    _require(hash(again) == hash(codec), f"{codec!r} is equal to what its repr makes, and has another hash")
    if codec.name in registry.names():
        params = registry.params_of(codec)
        _require(registry.create(params) == codec, f"the registry makes something else than {codec!r} of {params}")


def check_sizes(codec: Codec) -> None:
    """What is encoded has as many bytes as `wire_bytes` says, in the wire's dtype; no input is changed."""
    for dtype, n, values in _pieces():
        what = f"{codec!r}, {n} values of {dtype}"
        before = values.tobytes()
        data = codec.encode(values, codec.init(n))
        _require(values.tobytes() == before, f"{what}: encode changed the values")
        _require(isinstance(data, np.ndarray) and data.flags.c_contiguous, f"{what}: encode gave no contiguous array")
        wire_dtype = codec.wire_dtype(dtype)
        expected_dtype = np.dtype(np.uint8) if wire_dtype is None else wire_dtype
        _require(data.dtype == expected_dtype, f"{what}: encode gave {data.dtype}, not {expected_dtype}")
        expected = codec.wire_bytes(n, dtype)
        _require(data.nbytes == expected, f"{what}: encode gave {data.nbytes} bytes; wire_bytes says {expected}")
        _require(wire_dtype is None or data.size == n, f"{what}: {data.size} numbers of the wire's dtype")


def check_decoding(codec: Codec) -> None:
    """`decode` writes every value and nothing else; `add` and `subtract` do it in one step; data stays as it is."""
    for dtype, n, values in _pieces():
        data = codec.encode(values, codec.init(n)).copy()
        data.flags.writeable = False
        start = np.linspace(-1, 1, n).astype(sum_dtype(dtype))
        start[::3] = -0.0
        decoded = _within(codec.decode, data, start, f"{codec!r}, decode to {n} values of {start.dtype}")
        again = _within(codec.decode, data, np.full_like(start, np.nan), f"{codec!r}, decode to {n} values")
        what = f"{codec!r}, {n} values of {dtype}"
        _same(again, decoded, f"{what}: decode gave something else where something else was before")
        added = _within(codec.add, data, start, f"{what}, add")
        _same(added, start + decoded, f"{what}: add is not decode and a sum")
        subtracted = _within(codec.subtract, data, start, f"{what}, subtract")
        _same(subtracted, start - decoded, f"{what}: subtract is not decode and a difference")
        if codec.exact:
            _same(decoded, values.astype(start.dtype), f"{what}: it says that it is exact, and decodes something else")


def check_repeats(codec: Codec) -> None:
    """The same pushes give the same bytes, wherever the values are in memory, and whatever stands beside them."""
    for dtype, n, values in _pieces():
        alone, beside = codec.init(n), codec.init(n)
        wide = np.full(n + 2, np.nan, dtype)
        for push in range(PUSHES):
            value = _turned(values, push)
            wide[1:-1] = value
            found, expected = codec.encode(wide[1:-1], beside), codec.encode(value, alone)
            _same(found, expected, f"{codec!r}, {n} values of {dtype}, push {push}: other bytes from other memory")


def check_states(codec: Codec) -> None:
    """A state is named arrays, and all that it remembers: a copy of it goes on with the same bytes."""
    for dtype, n, values in _pieces():
        what = f"{codec!r}, {n} values of {dtype}"
        state = codec.init(n)
        arrays = all(isinstance(name, str) and isinstance(value, np.ndarray) for name, value in state.items())
        _require(arrays, f"{what}: init gave something else than named arrays: {state}")
        _check_residual(codec, state, n, what)
        for push in range(PUSHES):
            saved = {name: value.copy() for name, value in state.items()}
            expected = codec.encode(_turned(values, push), state).copy()
            found = codec.encode(_turned(values, push), saved)
            _same(found, expected, f"{what}, push {push}: a copy of the state gave other bytes")
            _require(set(saved) == set(state), f"{what}, push {push}: the state has other names")
            for name, value in state.items():
                _same(saved[name], value, f"{what}, push {push}: {name!r} of a copy of the state became something else")


def check_feedback(codec: Codec) -> None:
    """What was decoded of all pushes, and the residual, are what was pushed, but for the rounding of two sums each.

    Computed exactly. Only of codecs that have a residual.
    """
    if not codec.has_residual:
        return
    for dtype, n, values in _pieces():
        if n > 100:
            continue  # fractions take time
        state = codec.init(n)
        left, bound = [Fraction(0)] * n, [Fraction(0)] * n
        for push in range(PUSHES):
            given = _turned(values, push).astype(FLOAT32)
            before = state["residual"].copy()
            data = codec.encode(_turned(values, push), state)
            out = np.empty(n, sum_dtype(dtype))
            codec.decode(data, out)
            for i in range(n):
                total, sent = Fraction(float(before[i])) + Fraction(float(given[i])), Fraction(float(out[i]))
                left[i] += Fraction(float(given[i])) - sent
                # the sum is rounded, and the difference, which is up to that much larger than without
                error = abs(total) * _ROUNDING + _LEAST
                bound[i] += error + (abs(total - sent) + error) * _ROUNDING + _LEAST
        for i in range(n):
            off = abs(left[i] - Fraction(float(state["residual"][i])))
            _require(
                off <= bound[i],
                f"{codec!r}, element {i} of {n} of {dtype}: after {PUSHES} pushes {float(left[i])} is owed, and the "
                f"residual is {float(state['residual'][i])}",
            )


def check_not_finite(codec: Codec) -> None:
    """After a push with NaN and infinities, pushes of finite numbers decode to finite numbers again."""
    for n in LENGTHS:
        state = codec.init(n)
        values = _values(n, FLOAT32)
        for odd in (np.nan, np.inf, -np.inf):
            broken = values.copy()
            broken[::3] = odd
            codec.encode(broken, state)
            out = np.zeros(n, FLOAT32)
            codec.decode(codec.encode(values, state), out)
            what = f"{codec!r}, {n} values"
            _require(bool(np.isfinite(out).all()), f"{what}: the push after one with {odd} decodes to {out}")
            if codec.has_residual:
                _require(bool(np.isfinite(state["residual"]).all()), f"{what}: {odd} stays in the residual")


def check_threads(codec: Codec) -> None:
    """Several threads may use it at the same time, each with a state of its own."""
    n = 100_003
    values = _values(n, FLOAT32)

    def pushes() -> list[bytes]:
        state, total, found = codec.init(n), np.zeros(n, FLOAT32), []
        for push in range(PUSHES):
            data = codec.encode(_turned(values, push), state)
            codec.add(data, total)
            found += [data.tobytes(), total.tobytes()]
        return found

    expected, results = pushes(), list[list[bytes]]()
    threads = [threading.Thread(target=lambda: results.append(pushes())) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _require(results == [expected] * THREADS, f"{codec!r}: {THREADS} threads at the same time gave other bytes")


def check_damaged(codec: Codec) -> None:
    """Data that is too short or too long is an MpikvError, and nothing is written."""
    for n in LENGTHS[1:]:
        data = codec.encode(_values(n, FLOAT32), codec.init(n))
        for wrong in (data[:-1], data[:0], np.concatenate([data, data[:1]])):
            for call in (codec.decode, codec.add, codec.subtract):
                out = np.full(n, 7, FLOAT32)
                what = f"{codec!r}, {call.__name__} of {wrong.nbytes} bytes where {data.nbytes} belong to {n} values"
                try:
                    call(wrong, out)
                except MpikvError:
                    _require(bool((out == 7).all()), f"{what}: wrote something")
                except Exception as error:
                    raise AssertionError(f"{what}: {type(error).__name__}, not MpikvError") from error
                else:
                    raise AssertionError(f"{what}: no error")


CHECKS: tuple[Callable[[Codec], None], ...] = (
    check_sizes,
    check_decoding,
    check_repeats,
    check_states,
    check_feedback,
    check_not_finite,
    check_threads,
    check_damaged,
)
"""All of them but `check_value`."""


def _require(fine: bool, text: str) -> None:
    if not fine:
        raise AssertionError(text)


def _same(found: HostArray, expected: HostArray, text: str) -> None:
    if found.dtype != expected.dtype or found.tobytes() != expected.tobytes():
        raise AssertionError(f"{text}: {found} and {expected}")


def _check_residual(codec: Codec, state: State, n: int, what: str) -> None:
    """Require that error feedback can be made, by the codec or around it."""
    if codec.has_residual:
        residual = state.get("residual")
        fine = residual is not None and residual.shape == (n,) and residual.dtype == FLOAT32
        _require(fine, f"{what}: it says that it has a residual, and its state has no (n,) float32 of that name")
    elif not codec.exact:
        _require("residual" not in state, f"{what}: it keeps a residual and does not say `has_residual = True`")
        ErrorFeedback(codec)


def _values(n: int, dtype: np.dtype[Any]) -> HostArray:
    """Return n numbers of any size that float16 holds, some of them equal, and zeros of both signs."""
    numbers = np.random.default_rng(n).standard_normal(n) * 2.0 ** (np.arange(n) % 9 - 4)
    numbers[3::7] = 0.5
    numbers[4::11] = 0.0
    numbers[5::11] = -0.0
    values: HostArray = numbers.astype(dtype)
    return values


def _turned(values: HostArray, push: int) -> HostArray:
    turned: HostArray = np.roll(values, push)
    return turned


def _pieces() -> Iterator[tuple[np.dtype[Any], int, HostArray]]:
    for dtype in DTYPES:
        for n in LENGTHS if dtype == FLOAT32 else LENGTHS[:6]:
            yield dtype, n, _values(n, dtype)


def _within(call: Callable[[HostArray, HostArray], None], data: HostArray, start: HostArray, what: str) -> HostArray:
    """Return what a call makes of `start`, and require that it writes nothing beside it."""
    wide = np.full(start.size + 2, 42, start.dtype)
    wide[1:-1] = start
    call(data, wide[1:-1])
    _require(wide[0] == 42 and wide[-1] == 42, f"{what}: wrote beside the array")
    written: HostArray = wide[1:-1].copy()
    return written
