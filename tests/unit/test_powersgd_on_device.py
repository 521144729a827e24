"""powersgd in device memory: the host's factors, but for the order of sums; all else to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from on_device_cases import FLOATS, LOW_RANK, ProgramsOfNumPy, codec_id, on_device, small_tiles
from program_cases import hard_values, same_bits

from mpikv.arrays import sum_dtype
from mpikv.codecs import registry
from mpikv.codecs.base import Codec
from mpikv.codecs.compression import make
from mpikv.codecs.on_device import Pushed
from mpikv.keys import KeyInfo
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.device_pieces import DevicePieces
from mpikv.strategies.pieces import Pieces
from mpikv.testing.fake_gpu import FakeGpu

F32 = np.dtype(np.float32)


def pushed_both(codec: Codec, values: np.ndarray, state: Any) -> tuple[np.ndarray, np.ndarray, Any, Any]:
    """What travels from the host and from the device, float32, and what each remembers; both began with `state`."""
    here, there = ({name: array.copy() for name, array in state.items()} for _ in range(2))
    with np.errstate(all="ignore"):
        expected = codec.encode(values.copy(), here).view(np.float32)
    data = np.full(expected.nbytes, 77, np.uint8)
    space: Any = ProgramsOfNumPy()
    on_device(codec, values.dtype).encode(space, [Pushed(values.copy(), data, there)])  # type: ignore[arg-type]
    return expected, data.view(np.float32), here, there


def total_of(values: np.ndarray, state: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        wide = values.astype(F32)
        return state["residual"] + wide if "residual" in state else wide


@pytest.mark.parametrize("codec", LOW_RANK, ids=codec_id)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 251, 1024, 1543])
def test_factors_are_those_of_the_host(codec: Codec, dtype: Any, n: int) -> None:
    state, unequal, sent = codec.init(n), 0, 0
    for round_ in range(6):
        values = np.random.default_rng([n, round_]).standard_normal(n).astype(dtype)
        with small_tiles():
            expected, found, here, there = pushed_both(codec, values, state)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max(initial=0))
        unequal, sent = unequal + int((found != expected).sum()), sent + found.size
        if "q" in state:
            assert same_bits(there["q"].reshape(-1), found[found.size - there["q"].size :])
        left = total_of(values, state)
        codec.subtract(found.view(codec.wire_dtype(dtype) or np.uint8), left)
        assert "residual" not in state or same_bits(there["residual"], left)
        state = here
    assert unequal <= sent / 100


@pytest.mark.parametrize("codec", LOW_RANK, ids=codec_id)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 251, 1543])
@pytest.mark.parametrize("add", [False, True])
def test_what_decodes_them_has_the_bits_of_the_host(codec: Codec, dtype: Any, n: int, add: bool) -> None:
    data = hard_values(codec.wire_bytes(n, dtype) // 4, F32, 3).view(np.uint8)
    expected = hard_values(n, sum_dtype(dtype), 9)
    found, space = expected.copy(), ProgramsOfNumPy()
    with small_tiles(), np.errstate(all="ignore"):
        (codec.add if add else codec.decode)(data, expected)
        on_device(codec, dtype).decode(space, data, found, add=add)  # type: ignore[arg-type]
    assert same_bits(found, expected)


@pytest.mark.parametrize("what", ["zeros", "a NaN", "an infinity", "too large", "one row", "of rank 1"])
def test_hard_matrices(what: str) -> None:
    """To the bit: where columns begin anew, and where nothing can be sent."""
    values = np.zeros((37, 29), np.float32)
    if what == "one row":
        values[3] = 1.0
    elif what == "of rank 1":
        values[...] = np.outer(np.arange(37), np.arange(29))
    elif what != "zeros":
        values[36, 28] = {"a NaN": np.nan, "an infinity": np.inf, "too large": 3e38}[what]
    if what == "too large":
        values[...] = 3e38
    codec = registry.create({"type": "powersgd", "columns": 29})
    with small_tiles():
        expected, found, here, there = pushed_both(codec, values.reshape(-1), codec.init(values.size))
    assert same_bits(found, expected)
    assert same_bits(there["q"], here["q"])
    assert np.isnan(found).all() == (what in {"a NaN", "an infinity", "too large"})
    assert np.isfinite(there["residual"]).all()


def test_tiles_as_long_as_they_are() -> None:
    """More rows and columns than a tile and a segment have."""
    n = 1100 * 1300 - 5
    codec = registry.create({"type": "powersgd", "columns": 1300, "rank": 2})
    values = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    expected, found, here, there = pushed_both(codec, values, codec.init(n))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert (found != expected).mean() < 0.01
    np.testing.assert_allclose(there["residual"], here["residual"], rtol=1e-5, atol=1e-6)


def test_pieces_of_a_key_keep_q_on_the_gpu() -> None:
    """It goes to files in the host's shape, and comes back; what travels is the same afterwards."""
    n = 31 * 20
    codec, info = make({"type": "powersgd", "columns": 20}).push, KeyInfo("w", 0, (31, 20), F32, "powersgd")
    gpu = FakeGpu()
    space = DeviceSpace(gpu)
    there, here = DevicePieces(info, codec, space), Pieces(info, codec)
    spans = [(0, 200), (200, n)]
    for round_ in range(4):
        values = np.random.default_rng(round_).standard_normal(n).astype(np.float32)
        before, found = gpu.counts["launches"], there.encode_all(space.from_host(values), spans)
        if round_:  # the first begins with residuals of zeros
            assert gpu.counts["launches"] - before == 10
        for span in spans:
            expected = here.encode(values, span).view(np.float32)
            np.testing.assert_allclose(space.to_host(found[span]).view(np.float32), expected, rtol=1e-4, atol=1e-5)
        states = there.states_on_host()
        assert all(not isinstance(state["q"], np.ndarray) for state in there.states.values())
        assert all(states[span]["q"].shape == here.states[span]["q"].shape for span in spans)
        if round_ == 1:
            there = DevicePieces(info, codec, space)
            there.recut(states, spans)
            again = there.states_on_host()
            assert all(same_bits(again[span][name], states[span][name]) for span in spans for name in states[span])
