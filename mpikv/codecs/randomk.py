"""A share of the values, drawn anew for every push, without saying where they are.

Of n values k = max(1, ceil(ratio n)) are sent, one from each of k ranges of n / k values. Which one, a hash of the
seed, of the number of the push and of the range tells, so that whoever decodes finds the same positions: what travels
is the number of the push (uint64), then k values (float32), both little-endian. Workers that have pushed as often draw
the same positions. What is not sent decodes to 0. Values are not scaled up: error feedback adds what was not sent to
later pushes.

Range i is [floor(i n / k), floor((i + 1) n / k)). With h = mix(mix(mix(seed) + push) + i), in which mix is the output
function of SplitMix64 and sums are taken modulo 2^64, the position in a range of `length` values is
floor(floor(h / 2^32) length / 2^32).

NaN and infinity are sent as they are where they are drawn; error feedback forgets those that are not.

Wire: 8 + 4 k bytes. State: the number of the push. Cost: work on k values, and one pass to decode.
Source: Stich, Cordonnier and Jaggi, NeurIPS 2018; Steele, Lea and Flood, OOPSLA 2014 (SplitMix64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.checks import whole
from mpikv.codecs import shares
from mpikv.codecs.base import State
from mpikv.codecs.blocks import as_float32
from mpikv.codecs.randomk_device import Drawn
from mpikv.codecs.sparse import Sparse
from mpikv.spaces.selection import drawn_positions, mix

_PUSH, _VALUE = np.dtype("<u8"), np.dtype("<f4")
_MASK = (1 << 64) - 1
_LONGEST = 1 << 32  # of a piece: so that a hash times a length fits into 64 bits


@dataclass(frozen=True)
class RandomK(Sparse):
    """Values at positions that are drawn. ratio: which share is sent, more than 0 and at most 1. seed: of the draw."""

    ratio: float = 0.01
    seed: int = 0

    name = "randomk"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", shares.ratio("randomk: ratio", self.ratio))
        object.__setattr__(self, "seed", whole("randomk: seed", self.seed, 0, _MASK))

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """The number of the push, and the values."""
        return _PUSH.itemsize + shares.count(self.ratio, n_elems) * _VALUE.itemsize

    def init(self, n_elems: int) -> State:
        """Nothing was pushed."""
        return {"pushes": np.zeros(1, np.uint64)}

    def on_device(self, dtype: np.dtype[Any]) -> Drawn:
        """Drawn, collected and added there."""
        return Drawn(dtype, False, self.ratio, mix(self.seed))

    def encode(self, values: HostArray, state: State) -> HostArray:
        """Collect the values that this push sends. Raises ValueError for 2^32 values and more."""
        if values.size >= _LONGEST:
            raise ValueError(f"{self!r}: {values.size} values in one piece; it takes less than 2^32")
        push = int(state["pushes"][0])
        state["pushes"][0] = (push + 1) & _MASK
        data = np.empty(self.wire_bytes(values.size, values.dtype), np.uint8)
        data[: _PUSH.itemsize].view(_PUSH)[0] = push
        data[_PUSH.itemsize :].view(_VALUE)[...] = as_float32(values[self.positions(push, values.size)])
        return data

    def positions(self, push: int, n_elems: int) -> HostArray:
        """Return which of n values are sent by the push of this number, in increasing order."""
        return drawn_positions(mix(self.seed), push, shares.count(self.ratio, n_elems), n_elems)

    def sent(self, data: HostArray, n_elems: int) -> tuple[HostArray, HostArray]:
        """Draw the positions again."""
        self.check_bytes(data, n_elems)
        push = int(data[: _PUSH.itemsize].view(_PUSH)[0])
        return self.positions(push, n_elems), data[_PUSH.itemsize :].view(_VALUE)
