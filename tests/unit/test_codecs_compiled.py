"""The compiled loops of codecs: the same bits as NumPy's; and what happens without Numba, or without its cache."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpikv.codecs import BFloat16, Codec, ErrorFeedback, Float16, Int8, OneBit, TwoBit, compiled

CODECS: tuple[Codec, ...] = (
    *(TwoBit(), TwoBit(0.1), TwoBit(1e-45), TwoBit(3e38), OneBit(), OneBit(1e-3), OneBit(3e38)),
    *(Int8(), Int8(1), Int8(3), Int8(1 << 20), ErrorFeedback(Int8()), ErrorFeedback(Int8(7))),
    *(ErrorFeedback(Float16()), ErrorFeedback(BFloat16())),
)
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 255, 256, 257, 1023, 1024, 1025, 100_003)
DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
TINY = float(np.finfo(np.float32).tiny)
ODD = [
    np.nan,
    -np.nan,
    np.inf,
    -np.inf,
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    TINY,
    -TINY,
    3.4e38,
    -3.4e38,
    0.5,
    -0.5,
    127.5,
    4e-36,
]


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
    """Return what three pushes send and leave."""
    state = codec.init(values.size)
    found = []
    for _ in range(3):
        found.append(codec.encode(values, state).tobytes())
        found += [state[name].tobytes() for name in sorted(state)]
    return found


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_same_bits(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    cases = [_values(kind, n) for kind in ("normal", "ties", "bits", "denormal", "odd") for n in LENGTHS]
    with np.errstate(all="ignore"):
        cases += [_values("odd", 1025).astype(dtype) for dtype in DTYPES]
    used = []
    run = compiled.run

    def counted(name: str, *arguments: Any) -> bool:
        used.append(run(name, *arguments))
        return used[-1]

    monkeypatch.setattr(compiled, "run", counted)
    for values in cases:
        values.flags.writeable = False
    fast = [_pushes(codec, values) for values in cases]
    feeds_back = isinstance(codec, ErrorFeedback)
    assert used.count(False) == (0 if feeds_back else 3 * 3)  # three pushes of each dtype but float32
    monkeypatch.setattr(compiled, "run", lambda *_: False)
    for values, found in zip(cases, fast, strict=True):
        assert found == _pushes(codec, values), (values.size, values.dtype)


@pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=repr)
def test_every_half_is_added_and_subtracted(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    data = np.arange(1 << 16, dtype=np.uint16).view(codec.wire_dtype(np.dtype(np.float32)))
    before = _values("normal", data.size)
    totals = []
    for _ in range(2):
        for change in (codec.add, codec.subtract):
            totals.append(before.copy())
            with np.errstate(all="ignore"):
                change(data, totals[-1])
        monkeypatch.setattr(compiled, "run", lambda *_: False)
    for found, expected in zip(totals[:2], totals[2:], strict=True):
        np.testing.assert_array_equal(found, expected)  # NaN, too, of any bits


def test_float16_where_rounding_changes() -> None:
    """Each half, what is in the middle to the next one, and the float32 on both sides of these, of both signs."""
    pytest.importorskip("numba")
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = np.append((halves[1:] + halves[:-1]) / 2, np.float32(65520))
    exact = np.concatenate([halves, middles, np.array([np.inf, np.nan, 3e38, 1e-45], np.float32)])
    values = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-1))])
    values = np.concatenate([values, -values])
    found = np.empty(values.size, np.float16)
    assert compiled.run("fp16", values, found.view(np.uint16))
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    beyond = np.isinf(expected) & np.isfinite(values)
    expected[beyond] = np.copysign(np.float16(65504), values[beyond])
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("codec", [TwoBit(), OneBit(), Int8()], ids=repr)
def test_arrays_that_are_not_aligned(codec: Codec) -> None:
    aligned = _values("normal", 1000)
    shifted = np.frombuffer(b"." + aligned.tobytes(), np.uint8)[1:].view(np.float32)
    assert not shifted.flags.aligned
    assert _pushes(codec, shifted) == _pushes(codec, aligned)


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

    def njit(signature: object, **options: bool) -> Any:
        asked.append(options)
        if options.get("cache"):
            raise error
        return lambda loop: loop

    class Kind:
        def __getitem__(self, item: object) -> str:
            return "array"

    types = SimpleNamespace(Array=lambda *_, **__: "array")
    fake = SimpleNamespace(
        njit=njit, types=types, float32=Kind(), uint8=Kind(), uint16=Kind(), int64=Kind(), void=lambda *_: "void"
    )
    monkeypatch.setitem(sys.modules, "numba", fake)
    monkeypatch.setattr(compiled, "_compiled", {})
    compiled.prepare("int8")
    assert asked == [{"nogil": True, "cache": True}, {"nogil": True}] * 2


def test_import_does_not_import_numba() -> None:
    code = "import sys, mpikv, mpikv.codecs; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_blocks_are_the_whole() -> None:
    """Error feedback encodes step by step; that must be what all at once gives."""
    for codec in (Float16(), Int8(), Int8(7)):
        values = _values("odd", 100_003) + np.float32(0)  # as a sum with a residual of 0: no -0.0
        with np.errstate(all="ignore"):
            state = {"residual": np.zeros(values.size, np.float32)}
            data = ErrorFeedback(codec).encode(values, state)
            expected = codec.encode(values, {})
            owed = values.copy()
            codec.subtract(expected, owed)
        owed[~np.isfinite(owed)] = 0
        assert data.dtype == expected.dtype
        assert data.tobytes() == expected.tobytes()
        assert state["residual"].tobytes() == owed.tobytes()
