"""The compiled loops of codecs: the same bits as NumPy's; and what happens without Numba, or without its cache."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpikv.arrays import compiled
from mpikv.codecs import Codec
from mpikv.codecs.cast import BFloat16, Float16
from mpikv.codecs.error_feedback import ErrorFeedback
from mpikv.codecs.identity import Identity
from mpikv.codecs.int8 import Int8
from mpikv.codecs.onebit import OneBit
from mpikv.codecs.twobit import TwoBit

CODECS: tuple[Codec, ...] = (
    *map(TwoBit, (0.5, 1e-45, 3e38)),
    *map(OneBit, (0.5, 3e38, -0.5)),
    *(Int8(), Int8(3), Int8(1 << 20), ErrorFeedback(Int8(7))),
    *(Float16(), BFloat16(), ErrorFeedback(Float16()), ErrorFeedback(BFloat16())),
)
LENGTHS = (0, 1, 3, 4, 7, 8, 9, 255, 257, 1024, 1025, 30_003)
DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
TINY = float(np.finfo(np.float32).tiny)
ODD = [127.5, 4e-36]
ODD += [sign * one for one in (np.nan, np.inf, 0.0, 1e-45, TINY, 3.4e38, 0.5) for sign in (1, -1)]


@pytest.fixture(autouse=True)
def _prepared() -> None:
    for name in ("2bit", "1bit", "int8", "fp16", "bf16"):
        compiled.prepare(name)


def _values(kind: str, n: int) -> np.ndarray:
    generator = np.random.default_rng(n)
    if kind == "normal":
        return generator.standard_normal(n, np.float32)
    if kind == "ties":
        return (generator.integers(-254, 255, n) / 2).astype(np.float32)
    if kind == "bits":
        return generator.integers(0, 1 << 32, n, np.uint32).view(np.float32)
    if kind == "denormal":
        return generator.integers(0, 1 << 24, n, np.uint32).view(np.float32)
    values = generator.standard_normal(n).astype(np.float32)
    where = generator.random(n) < 0.02
    values[where] = generator.choice(np.array(ODD, np.float32), np.count_nonzero(where))
    return values


def _pushes(codec: Codec, values: np.ndarray) -> list[bytes]:
    """Return what three pushes send and leave, and what becomes of other numbers by the last one."""
    state = codec.init(values.size)
    found = []
    for _ in range(3):
        with np.errstate(all="ignore"):
            found.append(codec.encode(values, state).tobytes())
        found += [state[name].tobytes() for name in sorted(state)]
    wire_dtype = codec.wire_dtype(values.dtype) or np.dtype(np.uint8)
    return [*found, *_decoded(codec, np.frombuffer(found[-1 - len(state)], wire_dtype), values.size)]


def _decoded(codec: Codec, data: np.ndarray, n: int) -> list[bytes]:
    """Return what `decode`, `add` and `subtract` make of other numbers, of all kinds but NaN."""
    before = _values("odd", n)
    before[np.isnan(before)] = -0.0  # of two NaNs either may be the sum
    found = []
    for change in (codec.decode, codec.add, codec.subtract):
        out = before.copy()
        with np.errstate(all="ignore"):
            change(data, out)
        found.append(out.tobytes())
    return found


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_same_bits(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    cases = [_values(kind, n) for kind in ("normal", "ties", "bits", "denormal", "odd") for n in LENGTHS]
    with np.errstate(all="ignore"):
        cases += [_values("odd", 1025).astype(dtype) for dtype in DTYPES]
    if isinstance(codec, Float16):  # NumPy makes a signalling NaN quiet on some machines; the sum with -0.0, on all
        with np.errstate(all="ignore"):
            cases = [values + values.dtype.type(-0.0) for values in cases]
    monkeypatch.setattr(compiled, "run", counted := Counted())
    for values in cases:
        values.flags.writeable = False
    fast = [_pushes(codec, values) for values in cases]
    # Three pushes of each dtype but float32, and but that of what travels, which is sent as it is.
    other_dtypes = len(DTYPES) - 1 - isinstance(codec, Float16 | BFloat16)
    assert counted.used.count(False) == (0 if isinstance(codec, ErrorFeedback) else 3 * other_dtypes)
    monkeypatch.setattr(compiled, "run", lambda *_: False)
    for values, found in zip(cases, fast, strict=True):
        assert found == _pushes(codec, values), (values.size, values.dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("codec", [Float16(), BFloat16(), Identity(), Int8(), Int8(5)], ids=repr)
def test_all_that_may_come(codec: Codec, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every half, and any bytes of `int8`: scales, too, that no encoder makes."""
    pytest.importorskip("numba")
    n, wire_dtype = 1 << 16, codec.wire_dtype(np.dtype(dtype))
    if wire_dtype is None:
        data = np.random.default_rng(0).integers(0, 256, codec.wire_bytes(n, np.dtype(dtype)), np.uint8)
    else:
        data = np.arange(n, dtype=np.uint16).view(wire_dtype)
    fast = _decoded(codec, data, n)
    monkeypatch.setattr(compiled, "run", lambda *_: False)
    for found, expected in zip(fast, _decoded(codec, data, n), strict=True):
        bits = np.frombuffer(expected, np.float32).copy()
        bits.view(np.uint32)[np.isnan(bits)] |= 1 << 22  # a sum makes a signalling NaN quiet, and a copy may not
        assert found == bits.tobytes()


def _near_halves(half: Any) -> np.ndarray:
    """float32: each number of this dtype, the middle of each two, and the floats beside these."""
    every = np.arange(1 << 16, dtype=np.uint16).view(half).astype(np.float32)
    ordered = np.unique(every[np.isfinite(every)])
    middles = ((ordered[1:].astype(np.float64) + ordered[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)]
    ends = np.array([65504, 65519.996, 65520, 3.4e38, np.inf], np.float32)
    return np.concatenate([every, middles, *beside, ends, -ends, _values("bits", 100_003)])


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_keys_of_half_precision_are_rounded_and_widened_as_numpy_does_it(
    half: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the largest number come infinities. One NaN is as good as another."""
    pytest.importorskip("numba")
    values = _near_halves(half)
    with np.errstate(all="ignore"):
        expected = values.astype(half)
    found, wide = np.empty_like(expected), np.empty_like(values)
    monkeypatch.setattr(compiled, "run", counted := Counted())
    compiled.cast_into(found, values)
    assert counted.used.count(True) == 1
    assert _same(found, expected)
    compiled.cast_into(wide, expected)
    assert counted.used.count(True) == (2 if half is np.float16 else 1)  # NumPy widens bfloat16 as fast
    assert _same(wide, expected.astype(np.float32))
    for total in (np.full_like(wide, -0.0), _values("odd", wide.size)):
        with np.errstate(all="ignore"):
            added = total + expected
        assert compiled.add_half(total, expected)
        assert _same(total, added)


class Counted:
    """Runs loops, and lists whether each was there."""

    def __init__(self) -> None:
        self.used: list[bool] = []
        self._run = compiled.run

    def __call__(self, *arguments: Any) -> bool:
        self.used.append(self._run(*arguments))
        return self.used[-1]


def _same(found: np.ndarray, expected: np.ndarray) -> bool:
    nan = np.isnan(expected)
    bits = f"u{expected.itemsize}"
    return np.array_equal(np.isnan(found), nan) and np.array_equal(found.view(bits)[~nan], expected.view(bits)[~nan])


def _arrays(name: str, n: int) -> list[Any]:
    values, out = np.ones(n, np.float32), np.full(n, 7, np.float32)
    halves, factor = np.full(n, 7, np.uint16), np.float32(1)
    return {
        "2bit": [values, out, factor, np.full(-(-n // 4), 7, np.uint8)],
        "1bit": [values, out, factor, np.full(-(-n // 8), 7, np.uint8)],
        "int8": [values, 256, np.full(n + 4 * -(-n // 256), 7, np.uint8)],
        "int8 add": [np.full(n + 4 * -(-n // 256), 7, np.uint8), 256, factor, False, out],
        "fp16": [values, compiled.LARGEST, halves],
        "bf16": [values, halves],
        "fp16 add": [halves, factor, False, out],
        "bf16 add": [halves, factor, False, out],
    }[name]


@pytest.mark.parametrize("name", [name for name in compiled._LOOPS if name != "finite"])
def test_lengths_that_do_not_fit(name: str) -> None:
    """Nothing is read or written beyond an array: each in turn is a short view of a longer one."""
    assert compiled.run(name, *_arrays(name, 2048))
    places = [i for i, one in enumerate(_arrays(name, 1)) if isinstance(one, np.ndarray)]
    for place in places:
        for length in (0, 16):
            arguments = _arrays(name, 2048)
            whole = list(arguments)
            before = [one.copy() if isinstance(one, np.ndarray) else one for one in arguments]
            arguments[place] = arguments[place][:length]
            assert not compiled.run(name, *arguments)
            assert all(np.array_equal(one, other) for one, other in zip(whole, before, strict=True))


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(compiled, "_compiled", {})
    compiled.prepare("2bit")
    values = np.ones(4, np.float32)
    assert not compiled.run("2bit", values, values.copy(), np.float32(0.5), np.zeros(1, np.uint8))
    assert TwoBit().encode(values, TwoBit().init(4)).tobytes() == b"\xff"


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError("read-only file system")])
def test_no_place_for_a_cache(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def njit(_signature: object, **options: bool) -> Any:
        asked.append(options)
        if options.get("cache"):
            raise error
        return lambda loop: loop

    monkeypatch.setattr(pytest.importorskip("numba"), "njit", njit)
    monkeypatch.setattr(compiled, "_compiled", {})
    compiled.prepare("int8")
    assert asked == [{"nogil": True, "cache": True}, {"nogil": True}] * len(compiled._OF_CODEC["int8"])
