"""A codec that sends eight bits for each value, and one scale for each block of values.

The scale of a block of `block` values is the largest magnitude in it divided by 127, in float32, but never so large
that 127 times the scale is infinite. The code of a value is value / scale, rounded to the nearest whole number, ties to
even: -127 to 127. It decodes to code times scale. A block is sent as its scale (float32, little-endian) and its codes
(int8). The last block is shorter.

A block whose scale is below the smallest normal float32 (1.2e-38: zeros and denormal numbers) is sent as zeros, with
scale 0; error feedback keeps what is lost. A block that holds a NaN or an infinity has NaN as its scale, so that all of
it decodes to NaN, by which loss scaling detects an overflow; error feedback keeps no residual of it.

Wire: n + 4 ceil(n / block) bytes. State: none. Cost: six passes over blocks in the cache, and one over memory; with
`compiled` two passes over each block, and one to decode or add it.
Source: block-wise quantization as in Dettmers et al., ICLR 2022, with a linear code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpikv.arrays import compiled
from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.base import State
from mpikv.codecs.blocks import BLOCK_ELEMS, FLOAT32, InBlocks, as_float32, empty, spans, step_of
from mpikv.common.checks import whole

_SCALE = np.dtype("<f4")
_LEAST = np.finfo(np.float32).tiny
_LARGEST = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # times 127 it is no infinity
_MAGNITUDE = np.int32(0x7FFFFFFF)  # a mask for a float32 without its sign: as integers these sort alike, NaN last
_MOST_BLOCK = 1 << 24


@dataclass(frozen=True)
class Int8(InBlocks):
    """One byte for each value. block: how many values share a scale."""

    block: int = 256

    name = "int8"
    on_device = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", whole("int8: block", self.block, 1, _MOST_BLOCK))

    @property
    def separate_elems(self) -> int:
        return max(BLOCK_ELEMS // self.block, 1) * self.block

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        return n_elems + _SCALE.itemsize * -(-n_elems // self.block)

    def _rows(self, data: HostArray, n_elems: int) -> Iterator[tuple[slice, HostArray, HostArray]]:
        """Yield spans of m whole blocks, each with its scales (m, 1) and codes (m, block) in `data`.

        On a GPU the scales are bytes, (m, 4), since it cannot read a number at an address that is no multiple of its
        size. A last, shorter block has a span of its own.
        """
        whole_elems = n_elems // self.block * self.block
        width = self.block + _SCALE.itemsize
        all_spans = [
            *spans(whole_elems, step_of(data, whole_elems, self.separate_elems)),
            *([slice(whole_elems, n_elems)] if whole_elems < n_elems else []),
        ]
        for span in all_spans:
            length = min(self.block, span.stop - span.start)
            m = (span.stop - span.start) // length
            begin = span.start // self.block * width
            rows = data[begin : begin + m * (length + _SCALE.itemsize)].reshape(m, -1)
            scales, codes = rows[:, : _SCALE.itemsize], rows[:, _SCALE.itemsize :].view(np.int8)
            yield span, scales.view(_SCALE) if isinstance(data, np.ndarray) else scales, codes

    def encode(self, values: HostArray, state: State) -> HostArray:
        data = empty(values, self.wire_bytes(values.size, values.dtype), np.uint8)
        if compiled.run(self.name, values, self.block, data):
            return data
        scratch = empty(values, step_of(values, values.size, self.separate_elems), FLOAT32)
        with np.errstate(all="ignore"):
            for span, scales, codes in self._rows(data, values.size):
                block = as_float32(values[span]).reshape(codes.shape)
                scaled = scratch[: codes.size].reshape(codes.shape)
                magnitudes = scaled.view(np.int32)
                np.bitwise_and(block.view(np.int32), _MAGNITUDE, out=magnitudes)
                scale = magnitudes.max(axis=1, keepdims=True).view(FLOAT32) / np.float32(127)
                np.copyto(scale, _LARGEST, where=(scale > _LARGEST) & (scale < np.inf))
                inverse = np.float32(1) / scale
                finite = np.isfinite(scale)
                sent = (scale >= _LEAST) & finite
                normal = isinstance(sent, np.ndarray) and sent.all()
                if not normal:
                    np.copyto(scale, np.float32(0), where=~sent)
                    np.copyto(scale, np.float32(np.nan), where=~finite)
                    np.copyto(inverse, np.float32(0), where=~sent)
                scales[...] = scale.view(scales.dtype)
                np.multiply(block, inverse, out=scaled)
                np.rint(scaled, out=scaled)
                if not normal:
                    np.copyto(scaled, np.float32(0), where=~finite)  # NaN cannot be cast to a code
                np.copyto(codes, scaled, casting="unsafe")
        return data

    def run(self, data: HostArray, factor: float, *, fresh: bool, out: HostArray) -> bool:
        return compiled.run("int8 add", data, self.block, np.float32(factor), fresh, out)

    def blocks(self, data: HostArray, n_elems: int) -> Iterator[tuple[slice, HostArray]]:
        scratch = empty(data, step_of(data, n_elems, self.separate_elems), FLOAT32)
        for span, scales, codes in self._rows(data, n_elems):
            values = scratch[: codes.size].reshape(codes.shape)
            np.copyto(values, codes)
            with np.errstate(over="ignore", invalid="ignore"):  # scales may be NaN, or damaged
                values *= scales.copy().view(_SCALE)
            yield span, values.reshape(-1)
