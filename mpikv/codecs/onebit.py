"""MXNet's compression to one bit: each value is sent as +1 or -1, and the difference stays in a residual.

Each element has a residual `res`, a float32 that is 0 at first. A push adds its value to it. Where `res > t` then, a 1
is sent and `res -= 1`; elsewhere a 0 is sent and `res += 1`. The first element is in the most significant bit of the
first byte; the last byte is filled up with zeros. A 1 decodes to +1, a 0 to -1. So gradients should be of that scale,
or the learning rate should make up for it.

A residual that is NaN or infinite is set to 0 after its bit is written: an infinite value sends its sign once, and a
NaN sends -1.

Wire: ceil(n / 8) bytes. State: 4 n bytes. Cost: about eight passes over blocks in the cache, and one over values and
residual in memory; one in all where `compiled` is used.
Source: `src/kvstore/gradient_compression-inl.h` of Apache MXNet 2.0; Seide et al., Interspeech 2014.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.blocks import FLOAT32, Threshold, as_float32, empty, spans, step_of, zero_non_finite

_EIGHT = np.dtype((np.void, 8 * FLOAT32.itemsize))  # eight values, which are looked up and written as one item
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
_DECODED_BYTES: HostArray = (_BITS * np.float32(2) - np.float32(1)).view(_EIGHT).reshape(-1)
_DECODED_BYTES.flags.writeable = False


@dataclass(frozen=True)
class OneBit(Threshold):
    """One bit for each value. threshold: t, any number."""

    name = "1bit"
    is_positive = False
    per_byte = 8

    def _encode(self, values: HostArray, residual: HostArray, t: Any, data: HostArray) -> None:
        step = step_of(values, values.size)
        above_, change_ = empty(values, step, np.int8), empty(values, step, FLOAT32)
        for span in spans(values.size, step):
            length = span.stop - span.start
            sums = residual[span]
            above, change = above_[:length], change_[:length]
            sums += as_float32(values[span])
            np.greater(sums, t, out=above.view(np.bool_))
            data[span.start // 8 : (span.stop + 7) // 8] = np.packbits(above.view(np.bool_))
            # the change of the residual: -1 where 1 was sent, else 1
            np.multiply(above, np.int8(-2), out=above)
            np.add(above, np.int8(1), out=above)
            np.copyto(change, above)
            sums += change
            zero_non_finite(sums)

    def _decoded_bytes(self) -> HostArray:
        return _DECODED_BYTES

    def _unpacked(self, data: HostArray, n_elems: int) -> HostArray:
        values = np.unpackbits(data)[:n_elems].astype(FLOAT32)
        values *= np.float32(2)
        values -= np.float32(1)
        return values
