"""The codec of keys that are not compressed: values travel as they are, at no cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.codecs.base import Codec, State


@dataclass(frozen=True)
class Identity(Codec):
    """What travels is the array itself, of any dtype."""

    name = "none"
    exact = rounds = True

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """That of the values."""
        return dtype

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """Those of the values."""
        return n_elems * dtype.itemsize

    def encode(self, values: HostArray, state: State) -> HostArray:
        """The array itself."""
        return values

    def decode(self, data: HostArray, out: HostArray) -> None:
        """Widen them: float16 and bfloat16 are added in float32, which holds each of them exactly."""
        np.copyto(out, data)


IDENTITY = Identity()
