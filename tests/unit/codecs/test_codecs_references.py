"""Codecs that are compressed with, each against its definition, element by element, and against what it promises."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import codec_references as reference
import ml_dtypes
import numpy as np
import pytest
from fixtures import make_codecs
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from mpikv import MpikvError
from mpikv.codecs import Codec, registry, topk
from mpikv.codecs.cast import Float16
from mpikv.codecs.compression import make, of_text
from mpikv.codecs.error_feedback import ErrorFeedback
from mpikv.codecs.identity import Identity
from mpikv.codecs.int8 import Int8
from mpikv.codecs.onebit import OneBit
from mpikv.codecs.powersgd import PowerSGD
from mpikv.codecs.residuals import cut_anew
from mpikv.codecs.topk import TopK
from mpikv.codecs.twobit import TwoBit

FIXTURES = Path(make_codecs.__file__).parent / "codecs"
KEPT = {"powersgd_rows"}  # bytes of one codec more
OURS = {"none", "fp16", "bf16", "2bit", "1bit", "int8", "topk", "powersgd"}
FLOATS = tuple(np.dtype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
MOST = float(np.finfo(np.float32).max)
ODD = [MOST, -MOST, 0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1.2e-38, 3.4e38, -3.4e38, 0.5, -0.5, 63.5, 127.0]
REFERENCES: dict[Codec, Any] = {
    TwoBit(): reference.two_bit(0.5),
    TwoBit(0.1): reference.two_bit(0.1),
    OneBit(): reference.one_bit(0.5),
    OneBit(1.5): reference.one_bit(1.5),
    OneBit(0): reference.one_bit(0),
    OneBit(-0.5): reference.one_bit(-0.5),
    Int8(): reference.int8(256),
    Int8(3): reference.int8(3),
    TopK(): reference.topk(0.01),
    TopK(0.3): reference.topk(0.3),
    TopK(0.3, 4): reference.topk(0.3, 4),
    TopK(0.3, 9): reference.topk(0.3, 9),
}


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def check_against_reference(codec: Codec, pushes: list[np.ndarray]) -> None:
    """Bytes, residuals and decoded values of some pushes, with and without error feedback around the codec."""
    encode, decode = REFERENCES[codec]
    n = pushes[0].size
    for outer in (codec, ErrorFeedback(codec)) if not codec.has_residual else (codec,):
        state = outer.init(n)
        residual = np.zeros(n, np.float32) if "residual" in state else None
        for values in pushes:
            data = outer.encode(values, state)
            expected, residual = reference.push(encode, decode, values, residual, feeds_back=outer is not codec)
            assert data.tobytes().hex() == expected.hex()
            if residual is not None:
                assert same_bits(state["residual"], residual)
            for dtype in (np.float32, np.float64):
                out = np.full(n, 7, dtype)
                outer.decode(data, out)
                assert same_bits(out, np.array(decode(expected, n), np.float32).astype(dtype))


@pytest.mark.parametrize("codec", REFERENCES, ids=repr)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_each_codec_is_its_definition(codec: Codec, data: st.DataObject) -> None:
    """With NaN, infinities, zeros, the smallest and the largest numbers, and ties; long ones repeat what is drawn."""
    elements = st.one_of(st.sampled_from(ODD), st.integers(-3, 3), st.floats(width=32)).map(float)
    n, dtype = data.draw(st.sampled_from([*range(20), 257])), data.draw(st.sampled_from(FLOATS))
    arrays = st_numpy.arrays(np.float32, min(n, 20), elements=elements)
    pushes = [np.resize(one, n) for one in data.draw(st.lists(arrays, min_size=1, max_size=3))]
    with np.errstate(over="ignore"):
        check_against_reference(codec, [one.astype(dtype) for one in pushes])


# --- factors


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("n", "columns"), [(50, 0), (100, 0), (137, 0), (257, 0), (140, 20), (137, 20), (140, 14)])
def test_powersgd_is_its_definition(n: int, columns: int, rank: int) -> None:
    """Factors up to one rounding of float32, since sums are made in another order; what they decode to bit by bit."""
    codec = PowerSGD(rank, columns)
    state = codec.init(n)
    columns = columns or math.isqrt(n - 1) + 1
    rows = -(-n // columns)
    for push in range(3):
        values = np.random.default_rng(push).standard_normal(n).astype(np.float32)
        q = state["q"].copy()
        data = codec.encode(values, state)
        p, new = reference.powersgd(list(values), q)
        found_p, found_q = np.split(data.view(np.float32), [rows * rank])
        np.testing.assert_array_max_ulp(found_p.reshape(rows, rank), p, 1)
        # of Q, up to one rounding of each of the `rows` terms of P that it is a sum of
        np.testing.assert_allclose(found_q.reshape(columns, rank), new, rtol=0, atol=2**-23 * np.linalg.norm(values))
        out = np.empty(n, np.float32)
        codec.decode(data, out)
        expected = reference.powersgd_decoded(found_p.reshape(rows, rank), found_q.reshape(columns, rank), n)
        assert same_bits(out, np.array(expected))
        assert same_bits(state["q"].reshape(-1), found_q)


@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        *[((), 0), ((100,), 0), ((5, 0), 0), ((0, 5), 0), ((100, 20), 20), ((64, 3, 5, 5), 75)],
        *[((100, 1), 0), ((1, 50000), 0), ((3, 50000), 0), ((4, 12), 0), ((4, 13), 13)],  # 4 x 12 is 3 (4 + 12)
    ],
)
def test_powersgd_has_the_rows_of_a_key(shape: tuple[int, ...], columns: int) -> None:
    """As in the paper, where factors are shorter than the values; error feedback around it changes nothing."""
    for codec in (PowerSGD(3), ErrorFeedback(PowerSGD(3))):
        found = codec.for_shape(shape)
        assert registry.params_of(found)["columns"] == columns
        assert found.row_elems == max(columns, 1)
        assert found.for_shape((7, 13)) == (found if columns else codec.for_shape((7, 13)))
    assert TwoBit().for_shape(shape) == TwoBit()


def test_powersgd_begins_anew() -> None:
    """After zeros, after NaN, and after numbers whose products float32 does not hold."""
    codec = PowerSGD(2)
    start = codec.init(2500)["q"]
    for values in (np.zeros(2500), np.full(2500, np.nan), np.full(2500, 3e38)):
        state = codec.init(2500)
        codec.encode(np.random.default_rng(0).standard_normal(2500), state)
        assert not np.array_equal(state["q"], start)
        out = np.empty(2500, np.float32)
        codec.decode(codec.encode(values.astype(np.float32), state), out)
        assert np.array_equal(state["q"], start)
        assert not out.any() if not values.any() else np.isnan(out).all()


# --- finding the largest


@pytest.mark.parametrize("n", [1 << 13, (1 << 13) + 1, 1 << 16, 100_003])
def test_the_largest_where_the_sample_misleads(n: int) -> None:
    """All large values where the sample does not look, or only there; all values equal; growing ones."""
    stride = -(-n // topk._SAMPLE_ELEMS)
    seen, unseen = np.zeros(n, np.float32), np.ones(n, np.float32)
    seen[::stride] = 1
    unseen[::stride] = 0
    for values in (seen, unseen, np.ones(n, np.float32), np.arange(n, dtype=np.float32), -np.arange(n)[::-1] / n):
        values = values.astype(np.float32)  # noqa: PLW2901
        for k in (1, 7, n // 100, n // 3, n - 1, n):
            expected = np.sort(np.argsort(-np.abs(values), kind="stable")[:k])
            assert np.array_equal(topk.largest(values, k), expected)


def test_a_share_is_what_the_user_wrote() -> None:
    """7 % of 100 are 7: in floating point, 0.07 * 100 is more."""
    assert math.ceil(0.07 * 100) == 8
    assert TopK(0.07).wire_bytes(100, np.dtype(np.float32)) == 7 * 8
    assert [TopK(0.07, 99).wire_bytes(n, np.dtype(np.float32)) for n in (99, 100)] == [99 * 4, 7 * 8]
    for n in range(200):
        for percent in (1, 7, 29, 57, 100):
            expected = min(n, max(1, math.ceil(Fraction(percent, 100) * n)))
            assert TopK(percent / 100).wire_bytes(n, np.dtype(np.float32)) == 8 * expected


# --- error feedback


def test_what_takes_error_feedback() -> None:
    assert registry.create("none") == Identity()
    assert registry.create("2bit") == TwoBit()
    assert registry.create("1bit") == OneBit()
    assert registry.create("int8") == ErrorFeedback(Int8())
    assert registry.create({"type": "int8", "error_feedback": False}) == Int8()
    assert registry.create("fp16") == ErrorFeedback(Float16())
    assert registry.create(Int8()) == Int8()
    for codec in (Identity(), TwoBit(), OneBit(), ErrorFeedback(Int8())):
        with pytest.raises(ValueError, match="leave ErrorFeedback out"):
            ErrorFeedback(codec)
    with pytest.raises(TypeError, match="put around a codec, not 'int8'"):
        ErrorFeedback("int8")  # type: ignore[arg-type]


def test_text_makes_it_again() -> None:
    own = {"type": "int8", "error_feedback": False, "block": 3}, {"type": "topk", "ratio": 0.5, "pull": "fp16"}
    for params in (*OURS, *own):
        found = make(params)
        assert of_text(found.text) == found
        assert of_text(found.text).text == found.text


def test_residuals_follow_their_elements_when_a_key_is_cut_anew() -> None:
    codec = registry.create("2bit")
    states = {(begin, end): codec.init(end - begin) for begin, end in ((0, 4), (4, 8), (8, 10))}
    for (begin, end), state in states.items():
        state["residual"][...] = np.arange(begin, end)
    new = cut_anew(codec, states, [(0, 3), (3, 10), (10, 12)])
    assert {piece: state["residual"].tolist() for piece, state in new.items()} == {
        (0, 3): [0, 1, 2],
        (3, 10): [3, 4, 5, 6, 7, 8, 9],
    }
    assert cut_anew(codec, {}, [(0, 3)]) == {}


# --- bad input


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"type": "2bit", "threshold": 0}, ValueError, "2bit: threshold must be more than 0"),
        ({"type": "2bit", "threshold": -1.0}, ValueError, "2bit: threshold must be more than 0"),
        ({"type": "2bit", "threshold": 1e-60}, ValueError, "2bit: threshold must be more than 0"),
        ({"type": "1bit", "threshold": -1e60}, ValueError, "1bit: threshold must fit into float32"),
        ({"type": "2bit", "threshold": 1e60}, ValueError, "2bit: threshold .* fit into float32"),
        ({"type": "2bit", "threshold": float("nan")}, ValueError, "2bit: threshold must be finite"),
        ({"type": "2bit", "threshold": "0.5"}, TypeError, "2bit: threshold is a number"),
        ({"type": "int8", "block": 0}, ValueError, "int8: block must be at least 1"),
        ({"type": "int8", "block": 1.5}, TypeError, "int8: block is a whole number"),
        ({"type": "topk", "ratio": 0}, ValueError, "topk: ratio must be more than 0"),
        ({"type": "topk", "ratio": 1.5}, ValueError, "topk: ratio must be more than 0 and at most 1"),
        ({"type": "topk", "ratio": True}, TypeError, "topk: ratio is a number"),
        ({"type": "topk", "whole_elems": -1}, ValueError, "topk: whole_elems must be at least 0"),
        ({"type": "topk", "whole_elems": 2.5}, TypeError, "topk: whole_elems is a whole number"),
        ({"type": "topk", "error_feedback": 1}, TypeError, "'error_feedback' is True or False"),
        ({"type": "2bit", "error_feedback": False}, TypeError, "takes threshold, not 'error_feedback'"),
        ({"type": "topk", "rate": 1}, TypeError, "takes ratio, whole_elems, error_feedback, not 'rate'"),
        ("randomk", ValueError, "unknown compression type 'randomk'.*topk sends as few values"),
        ({"type": "powersgd", "rank": 0}, ValueError, "powersgd: rank must be at least 1"),
        ("3bit", ValueError, "unknown compression type '3bit'; known: 1bit, 2bit"),
    ],
    ids=str,
)
def test_wrong_configurations(params: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        registry.create(params)


def test_damaged_positions() -> None:
    codec = TopK(0.5)
    data = codec.encode(np.arange(4, dtype=np.float32), {})
    for positions in ([3, 2], [2, 2], [2, 4], [0, 2**32 - 1]):
        data[:8].view(np.uint32)[...] = positions
        for call in (lambda: codec.decode(data, np.zeros(4, np.float32)), lambda: codec.check(data, 4)):
            with pytest.raises(MpikvError, match="positions do not increase, or go beyond the 4 values"):
                call()


# --- bytes that stay what they are


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.json")), ids=lambda path: path.stem)
def test_bytes_are_those_that_were_kept(path: Path) -> None:
    assert {path.stem for path in FIXTURES.glob("*.json")} == set(make_codecs.CODECS) == OURS | KEPT
    kept = json.loads(path.read_text())
    codec = registry.create(kept["codec"])
    state = codec.init(make_codecs.N)
    for values, expected in zip(make_codecs.pushes(path.stem), kept["pushes"], strict=True):
        assert codec.encode(values, state).tobytes().hex() == expected


# --- docs/compression.md

DOCUMENT = Path(__file__).parents[3] / "docs" / "compression.md"
TITLES = "| values, bytes as they are |"


def test_sizes_in_the_document() -> None:
    lines = DOCUMENT.read_text().splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith(TITLES)) :]
    titles, _, *rows, smaller = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[: table.index("")]]
    columns = [[name.strip("` ") for name in title.split(",")] for title in titles[1:]]
    for row in rows:
        n_elems, n_bytes, *sizes = [int(text.replace(" ", "")) for cell in row for text in cell.split(",")]
        assert n_bytes == 4 * n_elems
        for column, size in zip(columns, sizes, strict=True):
            assert {registry.create(one).wire_bytes(n_elems, np.dtype(np.float32)) for one in column} == {size}
    times = [f"{n_bytes / size:.1f}".removesuffix(".0") for size in sizes]
    assert smaller[1:] == times
