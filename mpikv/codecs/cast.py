"""Codecs that send numbers in half precision: two bytes for each.

float16 keeps 11 bits of a number and holds up to 65504; a larger number is sent as 65504. bfloat16 keeps 8 bits, and
the range of float32. Both round to nearest, ties to even.

Cost: one pass to encode, one to decode; without `compiled` float16 takes NumPy many times as long as bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpikv.arrays import compiled
from mpikv.arrays.as_numpy import BFLOAT16, HostArray, sum_dtype
from mpikv.codecs.base import State
from mpikv.codecs.blocks import BLOCK_ELEMS, Numbers, empty

FLOAT16 = np.dtype(np.float16)
LARGEST = np.finfo(np.float16).max
_MAGNITUDE, _INFINITE = np.uint16(0x7FFF), 0x7C00


class _Cast(Numbers):
    """The base of both codecs. half: the dtype that they send. given: what their compiled loops take besides arrays."""

    rounds = on_device = True
    half: ClassVar[np.dtype[Any]]
    given: ClassVar[tuple[Any, ...]] = ()

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return self.half

    @property
    def separate_elems(self) -> int:
        return BLOCK_ELEMS

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        return 2 * n_elems

    def encode(self, values: HostArray, state: State) -> HostArray:
        """Round each value. Values that are in this half precision already are returned as they are."""
        if values.dtype == self.half:
            return values
        data = empty(values, values.size, self.half)
        if not compiled.run(self.name, values, *self.given, data.view(np.uint16)):
            self._round(values.astype(sum_dtype(values.dtype), copy=False), data)
        return data

    def _round(self, values: HostArray, data: HostArray) -> None:
        np.copyto(data, values, casting="unsafe")


@dataclass(frozen=True)
class Float16(_Cast):
    """IEEE half precision. Infinities stay infinite."""

    name = "fp16"
    half = FLOAT16
    given = (compiled.LARGEST,)

    def _round(self, values: HostArray, data: HostArray) -> None:
        """Round the values; a finite number beyond the range of float16 becomes the largest that it can hold."""
        with np.errstate(over="ignore"):
            super()._round(values, data)
        # Read as integers without the sign, infinities are above all finite numbers; so one cheap maximum finds them.
        if isinstance(data, np.ndarray) and int((data.view(np.uint16) & _MAGNITUDE).max(initial=0)) < _INFINITE:
            return
        beyond = np.isinf(data)
        beyond &= np.isfinite(values)
        np.copyto(data, np.copysign(LARGEST, data), where=beyond)


@dataclass(frozen=True)
class BFloat16(_Cast):
    """bfloat16: the upper half of a float32."""

    name = "bf16"
    half = BFLOAT16
