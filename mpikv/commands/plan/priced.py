"""Codecs that encode nothing: they have the lengths of others, and say what these would cost.

The generators of the store run with them as with any codec (`EncodedPath`, `Client`), so that the messages of
compressed keys are counted without a second description of what travels when. How fast a codec is depends on the
machine, on its parameters and on whether there is Numba, so that there is no table of it: `plan/calibrate.py` measures
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.base import Codec, State
from mpikv.codecs.compression import KeyCompression
from mpikv.codecs.identity import IDENTITY
from mpikv.codecs.speed import Speed

Speeds = Mapping[Codec, Speed]
NO_SPEEDS: Speeds = MappingProxyType({})


def of_shapes(speeds: Speeds, shapes: Iterable[tuple[int, ...]]) -> Speeds:
    """Return also those of the codecs of keys of these shapes: for each element as fast as without a shape."""
    return {codec.for_shape(shape): speed for shape in {(), *shapes} for codec, speed in speeds.items()}


class Priced(Codec):
    """Has the lengths of `codec`. spend: called with the seconds that it would have worked."""

    name = "priced"

    def __init__(self, codec: Codec, speed: Speed, spend: Callable[[float], None]) -> None:
        self._codec, self._speed, self._spend = codec, speed, spend

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        """That of the codec."""
        return self._codec.wire_dtype(dtype)

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """Those of the codec."""
        return self._codec.wire_bytes(n_elems, dtype)

    @property
    def row_elems(self) -> int:
        """Those of the codec."""
        return self._codec.row_elems

    def encode(self, values: HostArray, state: State) -> HostArray:
        """Memory of the right length and of any content."""
        self._spend(values.size * self._speed.encode_s)
        wire_dtype = self._codec.wire_dtype(values.dtype)
        data: HostArray = np.empty(self._codec.wire_bytes(values.size, values.dtype), np.uint8)
        return data if wire_dtype is None else data.view(wire_dtype)

    def decode(self, data: HostArray, out: HostArray) -> None:
        """Leave `out` as it is."""
        self._spend(out.size * self._speed.decode_s)

    def add(self, data: HostArray, out: HostArray) -> None:
        """Leave `out` as it is."""
        self._spend(out.size * self._speed.add_s)


def priced(compression: KeyCompression, speeds: Speeds, spend: Callable[[float], None]) -> KeyCompression:
    """Return the same with codecs that encode nothing; what travels as it is still does."""

    def of(codec: Codec) -> Codec:
        return codec if codec == IDENTITY else Priced(codec, speeds[codec], spend)

    return KeyCompression(of(compression.push), of(compression.pull), compression.force)
