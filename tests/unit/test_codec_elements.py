"""Codecs as programs: bit for bit what the codec does with arrays of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from elements_cases import CODECS, FLOATS, codec_id
from program_cases import hard_values, same_bits

from mpikv.arrays import sum_dtype
from mpikv.codecs import elements, registry
from mpikv.codecs.base import Codec
from mpikv.codecs.identity import IDENTITY
from mpikv.keys import KeyInfo
from mpikv.strategies.pieces import Pieces

ROUNDS = 4


def values_of(n: int, dtype: Any, round_: int) -> np.ndarray:
    """Every second time infinities, NaN and the like."""
    if round_ % 2:
        return hard_values(n, dtype, round_)
    return (3 * np.random.default_rng(round_).standard_normal(n)).astype(dtype)


@pytest.mark.parametrize("codec", CODECS, ids=codec_id)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [1, 7, 251, 1024])
def test_encoded_decoded_and_what_is_owed(codec: Codec, dtype: Any, n: int) -> None:
    found, state = elements.elements_of(codec, dtype), codec.init(n)
    here = {name: array.copy() for name, array in state.items()}
    assert found.remembers == ("residual" in state)
    for round_ in range(ROUNDS):
        values = values_of(n, dtype, round_)
        with np.errstate(all="ignore"):
            expected = codec.encode(values.copy(), state).view(found.wire)
        data = np.full_like(expected, 77)
        program, numbers = elements.encoding(codec, dtype)
        program.run([values, data, *here.values()], numbers)
        assert same_bits(data, expected)
        assert all(same_bits(here[name], state[name]) for name in state)
        for add in (False, True):
            out = hard_values(n, sum_dtype(dtype), 9)
            decoded = out.copy()
            with np.errstate(all="ignore"):
                (codec.add if add else codec.decode)(expected, out)
            program, numbers = elements.decoding(codec, dtype, add=add)
            program.run([decoded, data], numbers)
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
    program, numbers = elements.paying(dtype)
    program.run([values, residual], numbers)
    assert same_bits(values, expected)
    assert same_bits(residual, pieces.states[0, n]["residual"])


@pytest.mark.parametrize("name", registry.names())
def test_which_codecs_treat_each_element_by_itself(name: str) -> None:
    expected = name in {"none", "fp16", "bf16", "2bit", "1bit"}
    assert (registry.create(name).elements(np.dtype(np.float32)) is not None) == expected


def test_nothing_is_done_to_what_travels_as_it_is() -> None:
    program, _ = elements.decoding(IDENTITY, np.dtype(np.float16), add=True)
    assert [one.name for one in program.operations] == ["cast", "add"]
