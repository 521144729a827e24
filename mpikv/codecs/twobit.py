"""MXNet's compression to two bits: each value is sent as +t, -t or 0, and the difference stays in a residual.

Each element has a residual `res`, a float32 that is 0 at first. A push adds its value to it. Then, where `res >= t`,
`11` is sent and `res -= t`; where `res <= -t`, `10` is sent and `res += t`; elsewhere `00`. Byte j holds elements 4j to
4j+3, the first in the two most significant bits; the last byte is filled up with zeros. `11` decodes to +t, `10` to -t,
the rest to 0.

A residual that is NaN or infinite is set to 0 after its code is written: an infinite value sends +t or -t once, and a
NaN sends 0.

Wire: ceil(n / 4) bytes. State: 4 n bytes. Cost: about ten passes over blocks in the cache, and one over values and
residual in memory; one in all where `compiled` is used.
Source: `src/kvstore/gradient_compression-inl.h` of Apache MXNet 1.9.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.blocks import FLOAT32, Threshold, as_float32, empty, spans, step_of, zero_non_finite

_FOUR = np.dtype((np.void, 4 * FLOAT32.itemsize))  # four values, which are looked up and written as one item
_WORD = np.dtype("<u4")  # four codes of one element each, the first in the lowest byte
# Multiplied with such a word, this puts the four codes side by side into the highest byte; no sum carries into it.
_GATHER, _HIGHEST = np.uint32(1 << 30 | 1 << 20 | 1 << 10 | 1), np.uint32(24)


@lru_cache(maxsize=64)
def _decoded_bytes(threshold: float) -> HostArray:
    """Return the four values of every byte, as one item each."""
    of_code = np.array([0, 0, -threshold, threshold], FLOAT32)
    codes = np.arange(256)[:, None] >> np.array([6, 4, 2, 0]) & 3
    table: HostArray = of_code[codes].view(_FOUR).reshape(-1)
    table.flags.writeable = False
    return table


@dataclass(frozen=True)
class TwoBit(Threshold):
    """Two bits for each value. threshold: t, more than 0."""

    name = "2bit"
    per_byte = 4

    def _encode(self, values: HostArray, residual: HostArray, t: Any, data: HostArray) -> None:
        step = step_of(values, values.size)
        plus_, minus_, signs_ = (empty(values, step, np.int8) for _ in range(3))
        codes_, sent_ = empty(values, (step + 3) // 4 * 4, np.uint8), empty(values, step, FLOAT32)
        for span in spans(values.size, step):
            length = span.stop - span.start
            sums = residual[span]
            plus, minus, signs, sent = plus_[:length], minus_[:length], signs_[:length], sent_[:length]
            codes = codes_[: (length + 3) // 4 * 4]
            sums += as_float32(values[span])
            np.greater_equal(sums, t, out=plus.view(np.bool_))
            np.less_equal(sums, -t, out=minus.view(np.bool_))
            # 3 for plus, 2 for minus
            code = codes[:length].view(np.int8)
            np.add(plus, minus, out=code)
            np.add(code, code, out=code)
            np.add(code, plus, out=code)
            codes[length:] = 0
            words = codes.view(_WORD)
            np.multiply(words, _GATHER, out=words)
            np.right_shift(words, _HIGHEST, out=words)
            data[span.start // 4 : (span.stop + 3) // 4] = words
            np.subtract(plus, minus, out=signs)
            np.copyto(sent, signs)
            sent *= t
            sums -= sent
            zero_non_finite(sums)

    def _decoded_bytes(self) -> HostArray:
        return _decoded_bytes(self.threshold)

    def _unpacked(self, data: HostArray, n_elems: int) -> HostArray:
        bits = np.unpackbits(data).view(np.int8).reshape(-1, 2)[:n_elems]
        sent, plus = bits[:, 0], bits[:, 1]
        values: HostArray = (sent * (plus + plus - sent)).astype(FLOAT32) * np.float32(self.threshold)
        return values
