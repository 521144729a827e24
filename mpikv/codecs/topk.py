"""A codec that sends the largest values of each piece, and their positions.

Of n values the k = max(1, ceil(ratio n)) that are largest by magnitude are sent; of equal ones the first. The encoded
data is k positions in increasing order (uint32), then k values (float32), both little-endian. A value that is not sent
decodes to 0; error feedback adds it to later pushes, until the sum is large enough. NaN counts as larger than infinity;
if there are more of both than k, error feedback keeps no residual of the rest.

A piece of at most `whole_elems` values, 0 by default, is sent whole, in float32: biases and small layers are few bytes,
and to send one value of them in each push costs accuracy.

How they are found: from a sample of the values a magnitude is guessed that a few more than k values exceed. These are
collected in one pass, and the k-th of them is found exactly. If fewer than k exceed it because many are equal to it, as
the zeros of a sparse gradient, the first of those are taken, too; if the sample was misleading, the k-th of all values
is found. On a GPU all values are sorted, since these steps would have to read results on the host.

Wire: 8 k bytes; 4 n of a piece that is sent whole. State: none. Cost: three passes over the values, and work on about
1.5 k of them. Source: Aji and Heafield, EMNLP 2017; Lin et al., ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.base import Codec, State
from mpikv.codecs.blocks import as_float32, empty
from mpikv.common.checks import number, whole
from mpikv.errors import MpikvError

_POSITION, _VALUE = np.dtype("<u4"), np.dtype("<f4")
_MAGNITUDE = np.int32(0x7FFFFFFF)  # a mask for a float32 without its sign: as integers these sort alike, NaN last
_SAMPLE_ELEMS = 1 << 13
_MOST_ELEMS = (1 << 32) - 1  # the longest piece: positions are uint32


@dataclass(frozen=True)
class TopK(Codec):
    """Sends the largest values. ratio: which share, more than 0 and at most 1. whole_elems: see above; 0: none."""

    ratio: float = 0.01
    whole_elems: int = 0

    name = "topk"
    on_device = True

    def __post_init__(self) -> None:
        ratio = number("topk: ratio", self.ratio)
        if not 0 < ratio <= 1:
            raise ValueError(f"topk: ratio must be more than 0 and at most 1, not {ratio:g}")
        object.__setattr__(self, "ratio", ratio)
        object.__setattr__(self, "whole_elems", whole("topk: whole_elems", self.whole_elems, 0, _MOST_ELEMS))

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        if n_elems <= self.whole_elems:
            return n_elems * _VALUE.itemsize
        return _count(self.ratio, n_elems) * (_POSITION.itemsize + _VALUE.itemsize)

    def encode(self, values: HostArray, state: State) -> HostArray:
        if values.size > _MOST_ELEMS:
            raise ValueError(f"{self!r}: {values.size} values in one piece; there are positions for 2^32")
        values = as_float32(values)
        if values.size <= self.whole_elems:
            return values.astype(_VALUE).view(np.uint8)
        positions = largest(values, _count(self.ratio, values.size))
        data = empty(values, self.wire_bytes(values.size, values.dtype), np.uint8)
        data[: positions.size * _POSITION.itemsize].view(_POSITION)[...] = positions
        data[positions.size * _POSITION.itemsize :].view(_VALUE)[...] = values[positions]
        return data

    def check(self, data: HostArray, n_elems: int) -> None:
        super().check(data, n_elems)
        if n_elems <= self.whole_elems or not isinstance(data, np.ndarray):
            return
        positions, _ = _fields(data)
        if positions.size and (positions[-1] >= n_elems or (positions[1:] <= positions[:-1]).any()):
            raise MpikvError(f"{self!r}: the positions do not increase, or go beyond the {n_elems} values")

    def decode(self, data: HostArray, out: HostArray) -> None:
        positions, values = self._sent(data, out.size)
        out[...] = 0.0
        out[positions] = values

    def add(self, data: HostArray, out: HostArray) -> None:
        positions, values = self._sent(data, out.size)
        sums = out[positions] + values
        out += 0.0  # `decode` and a sum would add 0.0 to all other elements, too, which turns -0.0 into 0.0
        out[positions] = sums

    def subtract(self, data: HostArray, out: HostArray) -> None:
        positions, values = self._sent(data, out.size)
        out[positions] -= values  # to subtract 0.0 from the others would change none of them

    def _sent(self, data: HostArray, n_elems: int) -> tuple[HostArray, HostArray]:
        """Return the positions, and the values there. Raises MpikvError for damaged data."""
        self.check(data, n_elems)
        if n_elems <= self.whole_elems:
            return np.arange(n_elems, like=data), data.view(_VALUE)
        positions, values = _fields(data)
        return positions.astype(np.int64), values


@lru_cache(maxsize=1024)
def _count(ratio: float, n_elems: int) -> int:
    """How many of n values are sent: max(1, ceil(ratio n)), or 0 if n is 0.

    `ratio` is taken as the decimal number that the user wrote: in floating point 0.07 * 100 is more than 7.
    """
    sent = Fraction(repr(ratio)) * n_elems
    return min(n_elems, max(1, -(-sent.numerator // sent.denominator)))


def _fields(data: HostArray) -> tuple[HostArray, HostArray]:
    bound = data.size // (_POSITION.itemsize + _VALUE.itemsize) * _POSITION.itemsize
    return data[:bound].view(_POSITION), data[bound:].view(_VALUE)


def largest(values: HostArray, k: int) -> HostArray:
    """Return the positions, in increasing order, of the k largest magnitudes in float32; of equal ones the first."""
    if k >= values.size:
        return np.arange(values.size, like=values)
    magnitudes = values.view(np.int32) & _MAGNITUDE
    if not isinstance(values, np.ndarray):
        return np.sort(np.argsort(-magnitudes, kind="stable")[:k])
    bound = _guess_bound(magnitudes, k)
    above = np.flatnonzero(magnitudes > bound)
    if above.size >= k:
        return largest_among(magnitudes, k, above)
    equal = np.flatnonzero(magnitudes == bound)[: k - above.size]
    if above.size + equal.size < k:
        return largest_among(magnitudes, k, np.arange(values.size))
    return np.sort(np.concatenate((above, equal)))


def largest_among(magnitudes: HostArray, k: int, candidates: HostArray) -> HostArray:
    """Return what `largest` does, of the values at `candidates` alone: k or more positions in increasing order."""
    found = magnitudes[candidates]
    kth = np.partition(found, found.size - k)[found.size - k]
    chosen = found > kth
    chosen[np.flatnonzero(found == kth)[: k - np.count_nonzero(chosen)]] = True
    positions: HostArray = candidates[chosen]
    return positions


def _guess_bound(magnitudes: HostArray, k: int) -> int:
    """Guess from a sample a magnitude that a few more than k values reach."""
    sample = magnitudes[:: -(-magnitudes.size // _SAMPLE_ELEMS)]
    expected = k * sample.size / magnitudes.size
    rank = int(expected + 4 * expected**0.5 + 4)  # plus four standard deviations of a random sample's count
    if rank >= sample.size:
        return 0
    return int(np.partition(sample, sample.size - rank)[sample.size - rank])
