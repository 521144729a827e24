"""Codecs that can work in device memory, and runs of their programs with NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from program_cases import DTYPES, Run, hard_values

from mpikv.arrays import sum_dtype
from mpikv.codecs import powersgd_device, registry
from mpikv.codecs.base import Codec
from mpikv.codecs.on_device import OnDevice, Pushed, paying
from mpikv.spaces.program import Program
from mpikv.spaces.routine import Routine

FLOATS = DTYPES[:4]
CODECS = [
    *(registry.create({"type": name}) for name in ("none", "fp16", "bf16", "2bit", "1bit", "int8")),
    *(registry.create({"type": name, "error_feedback": False}) for name in ("fp16", "bf16", "int8")),
    registry.create({"type": "2bit", "threshold": 1e-3}),
    registry.create({"type": "int8", "block": 16}),
    registry.create({"type": "int8", "block": 32, "error_feedback": False}),
    registry.create({"type": "topk", "ratio": 0.05, "whole_elems": 7}),
    registry.create({"type": "topk", "ratio": 0.3, "error_feedback": False}),
    registry.create({"type": "randomk", "ratio": 0.05, "seed": (1 << 64) - 3}),
    registry.create({"type": "randomk", "ratio": 0.3, "error_feedback": False}),
]

LOW_RANK = [  # whose sums have an order of their own on a GPU
    registry.create("powersgd"),
    registry.create({"type": "powersgd", "rank": 3, "error_feedback": False}),
    registry.create({"type": "powersgd", "rank": 1, "columns": 5}),
]


@contextmanager
def small_tiles() -> Iterator[None]:
    """Of powersgd: so that short pieces have several, of which some lie behind the values."""
    with pytest.MonkeyPatch.context() as patch:
        for name, elems in (("SEGMENT", 6), ("TILE_ELEMS", 8), ("BLOCK_ELEMS", 40)):
            patch.setattr(powersgd_device, name, elems)
        yield


def codec_id(codec: Codec) -> str:
    return repr(codec)


class ProgramsOfNumPy:
    """The part of a space that codecs use, on host memory. runs: all of them."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> np.ndarray:
        return np.full(n_elems * dtype.itemsize, 0x7D, np.uint8).view(dtype)

    def zeros(self, n_elems: int, dtype: np.dtype[Any]) -> np.ndarray:
        return np.zeros(n_elems, dtype)

    def copy(self, out: np.ndarray, value: Any) -> None:
        out[...] = value

    def cast(self, values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        with np.errstate(all="ignore"):
            return values.astype(dtype, copy=False)

    def launch(self, program: Program | Routine, arrays: Sequence[np.ndarray], numbers: Sequence[Any]) -> None:
        n_elems = arrays[0].size
        if not n_elems:
            return
        used = [array[:n] for array, n in zip(arrays, program.lengths(n_elems, numbers), strict=True)]
        before = [array.copy() for array in used]
        program.run(used, numbers)
        self.runs.append(Run(program, tuple(numbers), before, [array.copy() for array in used]))

    def launch_many(
        self, program: Program | Routine, runs: Sequence[tuple[Sequence[np.ndarray], Sequence[Any]]]
    ) -> None:
        for arrays, numbers in runs:
            self.launch(program, arrays, numbers)


def on_device(codec: Codec, dtype: np.dtype[Any]) -> OnDevice:
    found = codec.on_device(dtype)
    assert found is not None
    return found


def runs(n: int) -> list[Run]:
    """Of all programs of these codecs, from hard values."""
    with small_tiles():
        return [*_runs(n)]


def _runs(n: int) -> Iterator[Run]:
    space: Any = ProgramsOfNumPy()
    for codec in [*CODECS, *LOW_RANK]:
        for dtype in FLOATS:
            found, data = on_device(codec, dtype), np.zeros(codec.wire_bytes(n, dtype), np.uint8)
            for values, residual in _pushed(n, dtype):
                state = {**codec.init(n), "residual": residual} if found.remembers else codec.init(n)
                found.encode(space, [Pushed(values, data, state)])
                for add in (False, True):
                    found.decode(space, data, hard_values(n, sum_dtype(dtype), 2), add=add)
    for dtype in FLOATS:
        program, numbers = paying(dtype)
        space.launch(program, [hard_values(n, dtype, 0), hard_values(n, np.dtype(np.float32), 1)], numbers)
    yield from space.runs


def _pushed(n: int, dtype: np.dtype[Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Values and what is owed: hard ones; without those that make all of a block NaN; ordinary ones; all the same."""
    float32 = np.dtype(np.float32)
    yield hard_values(n, dtype, 0), hard_values(n, float32, 0)
    yield tuple(np.nan_to_num(hard_values(n, one, 1), posinf=1, neginf=-1) for one in (dtype, float32))
    yield tuple(np.random.default_rng(i).standard_normal(n).astype(one) for i, one in enumerate((dtype, float32)))
    yield np.ones(n, dtype), np.zeros(n, float32)
