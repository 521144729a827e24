"""Keys, bounds and plans at the edges; tests/property/test_placement_property.py has their laws."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv.placement.keys import (
    KeyInfo,
    Shard,
    check_key,
    even_bounds,
    plan_of_bounds,
    whole_bounds,
)


@pytest.mark.parametrize("key", ["", "w", "\0", "ü" * 300, 0, -1, 2**63 - 1, -(2**63)])
def test_valid_keys_come_back_as_they_are(key):
    assert check_key(key) == key
    assert type(check_key(key)) is type(key)


def test_numpy_keys_become_plain():
    assert type(check_key(np.int16(3))) is int
    assert type(check_key(np.uint64(3))) is int
    assert type(check_key(np.str_("w"))) is str


@pytest.mark.parametrize("key", [True, np.bool_(False), 1.0, np.float32(1), None, b"w", ("w",), ["w"], object])
def test_other_types(key):
    with pytest.raises(TypeError, match="a key is a str or an int, not"):
        check_key(key)


@pytest.mark.parametrize("key", [2**63, -(2**63) - 1, np.uint64(2**63)])
def test_ints_of_more_than_64_bits(key):
    with pytest.raises(ValueError, match="64 bits"):
        check_key(key)


@pytest.mark.parametrize(("shape", "n"), [((), 1), ((0,), 0), ((3,), 3), ((2, 0, 5), 0), ((2, 3, 4), 24)])
def test_sizes(shape, n):
    for dtype in (np.float16, np.float64):
        info = KeyInfo("w", 0, shape, np.dtype(dtype))
        assert (info.n_elems, info.n_bytes) == (n, n * np.dtype(dtype).itemsize)


def test_size_beyond_32_bits():
    assert KeyInfo("w", 0, (2**20, 2**20), np.dtype(np.int8)).n_elems == 2**40


def test_even_bounds():
    assert even_bounds(10, 4) == (0, 3, 6, 8, 10)
    assert even_bounds(2, 4) == (0, 1, 2, 2, 2)
    assert even_bounds(0, 3) == (0, 0, 0, 0)
    assert even_bounds(7, 1) == (0, 7)


def test_whole_bounds():
    assert [whole_bounds(5, 3, owner) for owner in range(3)] == [(0, 5, 5, 5), (0, 0, 5, 5), (0, 0, 0, 5)]


def test_plan_of_bounds_leaves_out_empty_parts():
    assert plan_of_bounds((0, 0, 3, 3, 5)) == (Shard(1, 0, 3), Shard(3, 3, 5))
    assert plan_of_bounds((0, 0, 0)) == ()
