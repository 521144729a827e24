"""Codecs that send numbers in half precision: two bytes for each.

float16 keeps 11 bits of a number and holds up to 65504; what is larger is sent as that. bfloat16 keeps 8 bits, and the
range of float32. Both round to nearest, ties to even.

Cost: one pass to encode, one to decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpikv.arrays import BFLOAT16, HostArray
from mpikv.codecs import compiled
from mpikv.codecs.base import Codec, State
from mpikv.codecs.blocks import BLOCK_ELEMS

FLOAT16 = np.dtype(np.float16)
LARGEST = float(np.finfo(np.float16).max)
_MAGNITUDE, _INFINITE = np.uint16(0x7FFF), 0x7C00


class _Cast(Codec):
    """What the two have in common."""

    rounds = True
    half: ClassVar[np.dtype[Any]]

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Half precision."""
        return self.half

    @property
    def separate_elems(self) -> int:
        """Each is encoded by itself."""
        return BLOCK_ELEMS

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """Two for each."""
        return 2 * n_elems

    def encode(self, values: HostArray, state: State) -> HostArray:
        """Round each."""
        return values.astype(self.half, copy=False)

    def decode(self, data: HostArray, out: HostArray) -> None:
        """Widen each."""
        self.check_bytes(data, out.size)
        np.copyto(out, data)

    def add(self, data: HostArray, out: HostArray) -> None:
        """Add each."""
        if not self._added(data, 1.0, out):
            super().add(data, out)

    def subtract(self, data: HostArray, out: HostArray) -> None:
        """Subtract each."""
        if not self._added(data, -1.0, out):
            super().subtract(data, out)

    def _added(self, data: HostArray, factor: float, out: HostArray) -> bool:
        self.check_bytes(data, out.size)
        return compiled.run(f"{self.name} add", data.view(np.uint16), np.float32(factor), out)


@dataclass(frozen=True)
class Float16(_Cast):
    """IEEE half precision. Infinities stay what they are."""

    name = "fp16"
    half = FLOAT16

    def encode(self, values: HostArray, state: State) -> HostArray:
        """Round each; a finite number that float16 cannot hold is sent as the largest that it can."""
        if values.dtype == FLOAT16:
            return values
        data = np.empty(values.size, FLOAT16)
        if compiled.run(self.name, values, data.view(np.uint16)):
            return data
        with np.errstate(over="ignore"):
            data = values.astype(FLOAT16)
        # As integers without the sign the infinities come after all finite numbers, and a maximum is cheap.
        if data.size and int((data.view(np.uint16) & _MAGNITUDE).max()) >= _INFINITE:
            beyond = np.isinf(data)
            beyond &= np.isfinite(values)
            data[beyond] = np.copysign(LARGEST, values[beyond]).astype(FLOAT16)
        return data


@dataclass(frozen=True)
class BFloat16(_Cast):
    """bfloat16: the upper half of a float32."""

    name = "bf16"
    half = BFLOAT16
