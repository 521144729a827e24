"""MXNet's compression to two bits: each value is sent as +t, -t or nothing, and what that leaves is sent later.

Each element has a residual `res`, a float32 that is 0 at first. A push adds its value to it. Then, where `res >= t`,
`11` is sent and `res -= t`; where `res <= -t`, `10` is sent and `res += t`; elsewhere `00`. Byte j holds elements 4j to
4j+3, the first in the two most significant bits; the last byte is filled up with zeros. `11` decodes to +t, `10` to -t,
the rest to 0.

A residual that is no finite number is set to 0 when its code has been made: an infinite value sends +t or -t once, and
a NaN sends nothing.

Wire: ceil(n / 4) bytes. State: 4 n bytes. Cost: about ten passes over blocks in the cache, and one over values and
residual in memory; one in all where `compiled` is used.
Source: `src/kvstore/gradient_compression-inl.h` of Apache MXNet 1.9.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.codecs.blocks import BLOCK_ELEMS, FLOAT32, as_float32, forget_what_is_not_finite, spans
from mpikv.codecs.on_device import BYTE, Elements
from mpikv.codecs.threshold import Threshold
from mpikv.spaces.tracing import where_positive

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

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """One for four values."""
        return (n_elems + 3) // 4

    def on_device(self, dtype: np.dtype[Any]) -> Elements:
        """3 for +t, 2 for -t."""
        t = np.float32(self.threshold)

        def encode(owed: Any) -> Any:
            # A sign is no NaN, and at least 0, where the one is not less than the other.
            minus = where_positive(np.sign(-t - owed) + 1, 2, 0)
            return where_positive(np.sign(owed - t) + 1, 3, minus).astype(np.uint8)

        def decode(code: Any) -> Any:
            number = code.astype(FLOAT32)
            return where_positive(number - 2, t, where_positive(number - 1, -t, 0))

        return Elements(dtype, True, BYTE, encode, decode, bits=2)

    def _encode(self, values: HostArray, residual: HostArray, t: Any, data: HostArray) -> None:
        n = values.size
        plus_, minus_, signs_ = (np.empty(min(n, BLOCK_ELEMS), np.int8) for _ in range(3))
        codes_, sent_ = np.zeros((min(n, BLOCK_ELEMS) + 3) // 4 * 4, np.uint8), np.empty(min(n, BLOCK_ELEMS), FLOAT32)
        for part in spans(n):
            length = part.stop - part.start
            owed = residual[part]
            plus, minus, signs, sent = plus_[:length], minus_[:length], signs_[:length], sent_[:length]
            codes = codes_[: (length + 3) // 4 * 4]
            owed += as_float32(values[part])
            np.greater_equal(owed, t, out=plus.view(np.bool_))
            np.less_equal(owed, -t, out=minus.view(np.bool_))
            # 3 for plus, 2 for minus
            code = codes[:length].view(np.int8)
            np.add(plus, minus, out=code)
            np.add(code, code, out=code)
            np.add(code, plus, out=code)
            codes[length:] = 0
            words = codes.view(_WORD)
            np.multiply(words, _GATHER, out=words)
            np.right_shift(words, _HIGHEST, out=words)
            data[part.start // 4 : (part.stop + 3) // 4] = words
            np.subtract(plus, minus, out=signs)
            np.copyto(sent, signs)
            sent *= t
            owed -= sent
            forget_what_is_not_finite(owed)

    def blocks(self, data: HostArray, n_elems: int) -> Iterator[tuple[slice, HostArray]]:
        """Look up four values for each byte."""
        table = _decoded_bytes(self.threshold)
        fours = np.empty((min(n_elems, BLOCK_ELEMS) + 3) // 4, _FOUR)
        for part in spans(n_elems):
            found = data[part.start // 4 : (part.stop + 3) // 4]
            # "clip" cannot happen, and lets `take` write without a buffer
            values = np.take(table, found, out=fours[: found.size], mode="clip").view(FLOAT32)
            yield part, values[: part.stop - part.start]
