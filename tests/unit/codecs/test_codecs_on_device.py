"""Codecs on CuPy's arrays: they send, decode and remember what they do on NumPy's, and the host waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Machine

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.codecs import registry
from mpikv.codecs.base import Codec
from mpikv.codecs.blocks import BLOCK_ELEMS
from mpikv.errors import MpikvError

FLOATS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))
LONG = 2 * BLOCK_ELEMS + 77
PUSHES = 3
CROSSINGS = ("syncs", "gets", "sets", "up", "down")
MOST_LAUNCHES = 180  # to encode and add; the fake counts one that makes an array twice
PARAMS: list[dict[str, Any]] = [
    *({"type": name} for name in ("none", "fp16", "bf16", "2bit", "1bit", "int8", "topk", "powersgd")),
    {"type": "2bit", "threshold": 1e-3},
    {"type": "1bit", "threshold": -0.5},
    *({"type": "int8", "block": block} for block in (3, 1 << 17)),
    *({"type": "topk", "ratio": 0.3, "whole_elems": elems} for elems in (7, 1 << 17)),
    {"type": "powersgd", "rank": 3, "columns": 5},
]
KEEPERS = ("none", "2bit", "1bit")  # of what they lose, or lose nothing
CODECS = [
    *map(registry.create, PARAMS),
    *(registry.create({**one, "error_feedback": False}) for one in PARAMS if one["type"] not in KEEPERS),
]


def hard(n: int, dtype: np.dtype[Any], push: int) -> np.ndarray:
    """Every second push has NaN, infinities, zeros of both signs, denormals, the largest and equal numbers."""
    rng = np.random.default_rng([n, push])
    values = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3, n)).astype(dtype)
    limits = ml_dtypes.finfo(dtype)
    listed = [0.0, 0.5, 0.5, 3.0, float(limits.smallest_subnormal), float(limits.tiny), float(limits.max)]
    odd = np.array([*listed, np.inf, *(-one for one in listed), -np.inf, np.nan]).astype(dtype)
    chosen = rng.random(n) < (0.02 if push % 2 else 0.0)
    values[chosen] = odd[rng.integers(0, odd.size, n)][chosen]
    return values


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays have the same bits; one NaN is as good as another."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.dtype.kind in "iu":
        return np.array_equal(first, second)
    nan = np.isnan(first)
    return np.array_equal(nan, np.isnan(second)) and first[~nan].tobytes() == second[~nan].tobytes()


class Pair:
    """A codec's state on both sides, after the same pushes."""

    def __init__(self, codec: Codec, n: int, dtype: np.dtype[Any]) -> None:
        self.codec, self.n, self.machine = codec, n, Machine(memory_bytes=1 << 33)
        self.cupy = self.machine.process()
        self.here = codec.init(n)
        self.there = {name: self.cupy.asarray(array) for name, array in codec.init(n).items()}

    def push(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """What travels from here and from there, and in how many launches it was made."""
        on_gpu = self.cupy.asarray(values)
        with np.errstate(all="ignore"):
            expected = self.codec.encode(values, self.here)
        with self.alone() as launches:
            found = self.codec.encode(on_gpu, self.there)
        assert isinstance(found, self.cupy.ndarray)
        assert on_gpu.get().tobytes() == values.tobytes()
        return expected, found.get(), launches()

    @contextmanager
    def alone(self) -> Iterator[Callable[[], int]]:
        """Nothing within may make the host wait, or copy. Gives a function that counts the launches."""
        counts = self.machine.counts
        before, began = [counts[name] for name in CROSSINGS], counts["launches"]
        yield lambda: counts["launches"] - began
        assert [counts[name] for name in CROSSINGS] == before


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 251, LONG])
def test_the_bytes_values_and_states_of_the_host(codec: Codec, dtype: np.dtype[Any], n: int) -> None:
    pair = Pair(codec, n, dtype)
    for push in range(PUSHES):
        expected, found, _ = pair.push(hard(n, dtype, push))
        wire = np.dtype(np.float32) if codec.name == "powersgd" else codec.wire_dtype(dtype) or np.dtype(np.uint8)
        assert same_bits(found.view(wire), expected.view(wire))
        assert all(same_bits(pair.there[name].get(), array) for name, array in pair.here.items())
        for call in ("decode", "add", "subtract"):
            out = np.random.default_rng(n).standard_normal(n).astype(sum_dtype(dtype))
            out[::3] = -0.0
            data, total = pair.cupy.asarray(expected), pair.cupy.asarray(out)
            with pair.alone():
                getattr(codec, call)(data, total)
            with np.errstate(all="ignore"):
                getattr(codec, call)(expected, out)
            assert same_bits(total.get(), out), call
            if n:
                with pytest.raises(MpikvError, match="bytes are here"):
                    getattr(codec, call)(data[:-1], total)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_launches_do_not_grow_with_the_length(codec: Codec) -> None:
    """Of two lengths that leave as much behind the last block."""
    dtype, counted = np.dtype(np.float32), []
    for n in ((1 << 17) + 1, (1 << 19) + 1):
        pair = Pair(codec, n, dtype)
        _, found, encoding = pair.push(hard(n, dtype, 0))
        on_gpu, out = pair.cupy.asarray(found), pair.cupy.zeros(n, np.float32)
        with pair.alone() as launches:
            codec.add(on_gpu, out)
        counted.append((encoding, launches()))
    assert counted[0] == counted[1]
    assert sum(counted[0]) < MOST_LAUNCHES
