"""Keys, bounds and plans at the edges; tests/property/test_placement_property.py has their laws."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv.placement.keys import KeyInfo, Shard, check_key, plan_of_bounds


@pytest.mark.parametrize("kind", [str, int])
def test_valid_keys_come_back_as_plain_values(kind):
    keys = ("", "w", "\0", "ü" * 300, np.str_("w"), 0, -1, 2**63 - 1, -(2**63), np.int16(3), np.uint64(3))
    for key in (key for key in keys if isinstance(key, str) == (kind is str)):
        assert check_key(key) == key
        assert type(check_key(key)) is kind


def test_what_is_no_key():
    for key in (True, np.bool_(False), 1.0, np.float32(1), None, b"w", ("w",), ["w"], object):
        with pytest.raises(TypeError, match="a key is a str or an int, not"):
            check_key(key)
    for key in (2**63, -(2**63) - 1, np.uint64(2**63)):
        with pytest.raises(ValueError, match="64 bits"):
            check_key(key)


@pytest.mark.parametrize(
    ("shape", "n"), [((), 1), ((0,), 0), ((3,), 3), ((2, 0, 5), 0), ((2, 3, 4), 24), ((2**20,) * 2, 2**40)]
)
def test_sizes(shape, n):
    for dtype in (np.float16, np.float64):
        info = KeyInfo("w", 0, shape, np.dtype(dtype))
        assert (info.n_elems, info.n_bytes) == (n, n * np.dtype(dtype).itemsize)


def test_plan_of_bounds_leaves_out_empty_parts():
    assert plan_of_bounds((0, 0, 3, 3, 5)) == (Shard(1, 0, 3), Shard(3, 3, 5))
    assert plan_of_bounds((0, 0, 0)) == ()
