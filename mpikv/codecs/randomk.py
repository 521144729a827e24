"""A codec that sends a share of the values, drawn anew for every push, and not their positions.

Of n values k = max(1, ceil(ratio n)) are sent, one from each of k ranges of n / k values. A hash of the seed, the
number of the push and the range picks it, so that the receiver can compute the same positions. The encoded data is the
number of the push (uint64), then k values (float32), both little-endian. Workers that have pushed as often draw the
same positions. A value that is not sent decodes to 0. Values are not scaled up: error feedback adds those that were not
sent to later pushes.

Range i is [floor(i n / k), floor((i + 1) n / k)). With h = mix(mix(mix(seed) + push) + i), in which mix is the output
function of SplitMix64 and sums are taken modulo 2^64, the position in a range of `length` values is
floor(floor(h / 2^32) length / 2^32).

NaN and infinities are sent unchanged if they are drawn; error feedback keeps no residual of the others.

Wire: 8 + 4 k bytes. State: the number of the push. Cost: work on k values, and one pass to decode.
Source: Stich, Cordonnier and Jaggi, NeurIPS 2018; Steele, Lea and Flood, OOPSLA 2014 (SplitMix64).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.base import State
from mpikv.codecs.blocks import as_float32, empty
from mpikv.codecs.sparse import Sparse, count
from mpikv.common.checks import whole

_PUSH, _VALUE = np.dtype("<u8"), np.dtype("<f4")
_MASK = (1 << 64) - 1
_LONGEST = 1 << 32  # bound of a piece's length, so that a hash times a length fits into 64 bits


@dataclass(frozen=True)
class RandomK(Sparse):
    """Sends values at drawn positions. ratio: which share of them, more than 0 and at most 1. seed: of the draw."""

    seed: int = 0

    name = "randomk"
    host_state: ClassVar[tuple[str, ...]] = ("pushes",)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seed", whole("randomk: seed", self.seed, 0, _MASK))

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """The number of the push, and the values."""
        return _PUSH.itemsize + count(self.ratio, n_elems) * _VALUE.itemsize

    def init(self, n_elems: int) -> State:
        """The number of pushes, 0."""
        return {"pushes": np.zeros(1, np.uint64)}

    def encode(self, values: HostArray, state: State) -> HostArray:
        """Collect the values at this push's positions. Raises ValueError for 2^32 values and more."""
        if values.size >= _LONGEST:
            raise ValueError(f"{self!r}: {values.size} values in one piece; it takes less than 2^32")
        data = empty(values, self.wire_bytes(values.size, values.dtype), np.uint8)
        push = int(state["pushes"][0])
        state["pushes"] += np.uint64(1)
        push_field, value_field = _fields(data)
        push_field[...] = np.uint64(push)
        value_field[...] = as_float32(values[self._positions(self._start(push), values.size, values)])
        return data

    def positions(self, push: int, n_elems: int) -> HostArray:
        """Return which of n values are sent by the push of this number, in increasing order."""
        return self._positions(self._start(push), n_elems, np.empty(0))

    def _start(self, push: int) -> Any:
        """The number that the index of each range is added to before it is hashed."""
        return np.uint64(_mix_of(_mix_of(self.seed) + push))

    def _positions(self, start: Any, n_elems: int, array: HostArray) -> HostArray:
        """Return the positions, in the memory of `array`. start: a number, or (1,)."""
        k = count(self.ratio, n_elems)
        bounds = _bounds(k, n_elems) if isinstance(array, np.ndarray) else _bounds_like(k, n_elems, array)
        drawn = _mix(np.arange(k, dtype=np.uint64, like=array) + start) >> np.uint64(32)
        lengths = (bounds[1:] - bounds[:-1]).astype(np.uint64)
        positions: HostArray = bounds[:-1] + (drawn * lengths >> np.uint64(32)).astype(np.int64)
        return positions

    def sent(self, data: HostArray, n_elems: int) -> tuple[HostArray, HostArray]:
        """Compute the positions again, and return them with the values in `data`."""
        self.check(data, n_elems)
        push, values = _fields(data)
        if isinstance(data, np.ndarray):
            start = self._start(int(push[0]))
        else:  # the number of the push is on the GPU, and is not read on the host
            start = _mix(push + np.uint64(_mix_of(self.seed)))
        return self._positions(start, n_elems, data), values


def _fields(data: HostArray) -> tuple[HostArray, HostArray]:
    """Return views of encoded data: the number of the push, (1,), and the values."""
    return data[: _PUSH.itemsize].view(_PUSH), data[_PUSH.itemsize :].view(_VALUE)


def _bounds_like(k: int, n_elems: int, array: HostArray) -> HostArray:
    """Return where k ranges of n elements begin, and where the last one ends, in the memory of `array`."""
    return np.arange(k + 1, dtype=np.int64, like=array) * n_elems // max(k, 1)


@lru_cache(maxsize=64)
def _bounds(k: int, n_elems: int) -> HostArray:
    bounds = _bounds_like(k, n_elems, np.empty(0))
    bounds.flags.writeable = False
    return bounds


def _mix_of(number: int) -> int:
    """The output function of SplitMix64, of one number."""
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return z ^ z >> 31


def _mix(numbers: HostArray) -> HostArray:
    """The output function of SplitMix64, of each number; NumPy's sums and products are modulo 2^64 already."""
    z: HostArray = numbers + np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
