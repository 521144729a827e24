"""Codecs of the tests' own: one that loses nothing, and ones that cannot be added before they are decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import BFLOAT16
from mpikv.codecs import registry
from mpikv.codecs.base import Codec, State

_DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]


@registry.register
@dataclass(frozen=True)
class Reversed(Codec):
    """The bytes of the values, last first, behind one that names their dtype: nothing is lost, nothing can be added."""

    name = "reversed"
    exact = True

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        return 1 + n_elems * dtype.itemsize

    def encode(self, values: np.ndarray, state: State) -> np.ndarray:
        return np.concatenate([np.array([42 + _DTYPES.index(values.dtype)], np.uint8), values.view(np.uint8)[::-1]])

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        assert data.dtype == np.uint8
        np.copyto(out, np.ascontiguousarray(data[1:][::-1]).view(_DTYPES[data[0] - 42]))
