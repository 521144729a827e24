"""What a codec is: how a push travels to whoever adds it.

A worker encodes each piece of a push that travels by itself, and whoever adds it decodes it. All ranks agree on a key's
codec when the key is initialised, so that a step sends no lengths: both sides ask `wire_bytes`. What owners send back
is never encoded.

`decode` writes in the dtype that the key is added in. So a push that comes in fewer bits is widened by the same pass
that decodes it, and one that comes in that dtype is added where it lies, without a copy and without `decode`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from mpikv.arrays import HostArray


class Codec(Protocol):
    """One of them: a value without state, the same on every rank that knows it by this name."""

    name: str

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        """What values of `dtype` travel as: one number of this dtype for each. None: bytes that mean nothing alone."""
        ...

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """How many bytes n values of `dtype` are on their way."""
        ...

    def encode(self, values: HostArray) -> HostArray:
        """What travels of (n,) contiguous values: a contiguous array of `wire_bytes` bytes; it may be `values`."""
        ...

    def decode(self, data: HostArray, out: HostArray) -> None:
        """Write the values into `out`, (n,) in the dtype they are added in. data: of the wire's dtype, or uint8."""
        ...
