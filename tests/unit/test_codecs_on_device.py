"""Codecs as programs: bit for bit what the codec does with arrays of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from on_device_cases import CODECS, FLOATS, ProgramsOfNumPy, codec_id, on_device
from program_cases import hard_values, same_bits

from mpikv.arrays import sum_dtype
from mpikv.codecs import registry
from mpikv.codecs.base import Codec
from mpikv.codecs.on_device import Pushed, paying
from mpikv.keys import KeyInfo
from mpikv.strategies.pieces import Pieces

ROUNDS = 4


def values_of(n: int, dtype: Any, round_: int) -> np.ndarray:
    """Every second time infinities, NaN and the like; long enough for blocks without."""
    values = (3 * np.random.default_rng(round_).standard_normal(n)).astype(dtype)
    if round_ % 2:
        values[: n // 2] = hard_values(n, dtype, round_)[: n // 2]
    return values


@pytest.mark.grid
@pytest.mark.parametrize("codec", CODECS, ids=codec_id)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 251, 1024, 1543])
def test_encoded_decoded_and_what_is_owed(codec: Codec, dtype: Any, n: int) -> None:
    found, state, space = on_device(codec, dtype), codec.init(n), ProgramsOfNumPy()
    here = {name: array.copy() for name, array in state.items()}
    assert found.remembers == ("residual" in state)
    for round_ in range(ROUNDS):
        values = values_of(n, dtype, round_)
        with np.errstate(all="ignore"):
            expected = codec.encode(values.copy(), state).view(np.uint8)
        data = np.full_like(expected, 77)
        found.encode(space, [Pushed(values, data, here)])  # type: ignore[arg-type]
        wire = codec.wire_dtype(dtype) or np.dtype(np.uint8)
        assert same_bits(data.view(wire), expected.view(wire))
        assert all(same_bits(here[name], state[name]) for name in state)
        for add in (False, True):
            out = hard_values(n, sum_dtype(dtype), 9)
            decoded = out.copy()
            with np.errstate(all="ignore"):
                (codec.add if add else codec.decode)(expected.view(wire), out)
            found.decode(space, data, decoded, add=add)  # type: ignore[arg-type]
            assert same_bits(decoded, out)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_as_they_are_pay_what_is_owed(dtype: Any) -> None:
    """What their dtype cannot say stays owed, but nothing that is not finite."""
    n = 1000
    pieces = Pieces(KeyInfo(0, "w", (n,), dtype, "1bit"), registry.create("1bit"))
    pieces.encode(values_of(n, dtype, 0), (0, n))
    residual = pieces.states[0, n]["residual"].copy()
    values = values_of(n, dtype, 1)
    with np.errstate(all="ignore"):
        expected = pieces.with_owed(values)
    program, numbers = paying(dtype)
    program.run([values, residual], numbers)
    assert same_bits(values, expected)
    assert same_bits(residual, pieces.states[0, n]["residual"])


@pytest.mark.parametrize("name", registry.names())
def test_which_codecs_work_in_device_memory(name: str) -> None:
    can = name in {"none", "fp16", "bf16", "2bit", "1bit", "int8", "topk", "randomk", "powersgd"}
    assert (registry.create(name).on_device(np.dtype(np.float32)) is not None) == can


@pytest.mark.parametrize("block", [1, 8, 48, 2048])
def test_blocks_that_no_program_can_do(block: int) -> None:
    assert registry.create({"type": "int8", "block": block}).on_device(np.dtype(np.float32)) is None
