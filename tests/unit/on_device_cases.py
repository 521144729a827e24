"""Codecs that can work in device memory, and runs of their programs with NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from program_cases import DTYPES, Run, hard_values

from mpikv.arrays import sum_dtype
from mpikv.codecs import registry
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


def runs(n: int) -> Iterator[Run]:
    """Of all programs of these codecs, from hard values."""
    space: Any = ProgramsOfNumPy()
    for codec in CODECS:
        for dtype in FLOATS:
            found, data = on_device(codec, dtype), np.zeros(codec.wire_bytes(n, dtype), np.uint8)
            for seed in (0, 1):  # a NaN makes one of all of its block
                values, residual = (hard_values(n, one, seed) for one in (dtype, np.dtype(np.float32)))
                if seed:
                    values, residual = (np.nan_to_num(one, posinf=1, neginf=-1) for one in (values, residual))
                state = {**codec.init(n), "residual": residual} if found.remembers else codec.init(n)
                found.encode(space, [Pushed(values, data, state)])
                for add in (False, True):
                    found.decode(space, data, hard_values(n, sum_dtype(dtype), 2), add=add)
    for dtype in FLOATS:
        program, numbers = paying(dtype)
        space.launch(program, [hard_values(n, dtype, 0), hard_values(n, np.dtype(np.float32), 1)], numbers)
    yield from space.runs
