"""Codecs that treat each element by itself, and runs of their programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from program_cases import DTYPES, Run, hard_values

from mpikv.arrays import sum_dtype
from mpikv.codecs import elements, registry
from mpikv.codecs.base import Codec

FLOATS = DTYPES[:4]
CODECS = [
    *(registry.create({"type": name}) for name in ("none", "fp16", "bf16", "2bit", "1bit")),
    *(registry.create({"type": name, "error_feedback": False}) for name in ("fp16", "bf16")),
    registry.create({"type": "2bit", "threshold": 1e-3}),
]


def codec_id(codec: Codec) -> str:
    return repr(codec)


def runs(n: int) -> Iterator[Run]:
    """Of all these programs, from hard values."""
    for codec in CODECS:
        for dtype in FLOATS:
            found = elements.elements_of(codec, dtype)
            data = np.zeros(codec.wire_bytes(n, dtype) // found.wire.itemsize, found.wire)
            residual = [hard_values(n, elements.FLOAT32, 1)] if found.remembers else []
            encoded = run_of(elements.encoding(codec, dtype), [hard_values(n, dtype, 0), data, *residual])
            yield encoded
            for add in (False, True):
                out = hard_values(n, sum_dtype(dtype), 2)
                yield run_of(elements.decoding(codec, dtype, add=add), [out, encoded.after[1]])
    for dtype in FLOATS:
        yield run_of(elements.paying(dtype), [hard_values(n, dtype, 0), hard_values(n, elements.FLOAT32, 1)])


def run_of(made: tuple[Any, Any], before: list[np.ndarray]) -> Run:
    """One run by NumPy."""
    program, numbers = made
    after = [array.copy() for array in before]
    program.run(after, numbers)
    return Run(program, numbers, before, after)
