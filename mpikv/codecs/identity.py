"""The codec that every key has today: values travel as they are, at no cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv.arrays import HostArray


class Identity:
    """What travels is the array itself."""

    name = "none"

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """That of the values."""
        return dtype

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """Those of the values."""
        return n_elems * dtype.itemsize

    def encode(self, values: HostArray) -> HostArray:
        """The array itself."""
        return values

    def decode(self, data: HostArray, out: HostArray) -> None:
        """Widen them: float16 and bfloat16 are added in float32, which holds each of them exactly."""
        np.copyto(out, data)


IDENTITY = Identity()
