"""The codec int8 in device memory: the largest magnitude of each block, its scale, its codes.

The formulas of int8.py. Scales and codes are written where they travel, in one row for each block. Largest magnitudes
are found in two steps, of `GROUP` elements and of the rest of a block, so that enough threads take part.

Cost: values, and what is owed, are read twice; four launches to encode, one to decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.arrays import sum_dtype
from mpikv.codecs.on_device import FLOAT32, Made, OnDevice, Pushed, finite
from mpikv.spaces.program import Layout
from mpikv.spaces.tracing import rounded, trace, where_positive

if TYPE_CHECKING:
    from mpikv.spaces.device import DeviceSpace
    from mpikv.spaces.device_array import DeviceArray

LEAST = np.finfo(np.float32).tiny
LARGEST = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # times 127 it is no infinity
CODE = np.dtype(np.int8)
GROUP = 16
BLOCKS = tuple(GROUP << i for i in range(7))  # 16 to 1024


@dataclass(frozen=True)
class Blocks(OnDevice):
    """See `OnDevice`. block: one of `BLOCKS`."""

    block: int

    def _total(self, values: Any, owed: tuple[Any, ...]) -> Any:
        wide = values.astype(FLOAT32, copy=False)
        return owed[0] + wide if owed else wide

    @property
    def _owed(self) -> list[np.dtype[Any]]:
        return [FLOAT32] if self.remembers else []

    @property
    def _row(self) -> int:
        """Bytes of a block."""
        return self.block + FLOAT32.itemsize

    @cached_property
    def magnitudes(self) -> Made:
        """values, the largest of each group, residual."""

        def found(values: Any, largest: Any, *owed: Any) -> None:
            largest[...] = np.absolute(self._total(values, owed))

        return trace(found, [self.dtype, FLOAT32, *self._owed], {1: Layout(most=GROUP)})

    @cached_property
    def largest(self) -> Made:
        """The largest of each group, and of each block."""
        layouts = {1: Layout(most=self.block // GROUP)} if self.block > GROUP else {}
        return trace(lambda groups, blocks: np.copyto(blocks, groups), [FLOAT32] * 2, layouts)

    @cached_property
    def scales(self) -> Made:
        """The largest of each block, which becomes its scale, and the same where it travels."""

        def scale(largest: Any, sent: Any) -> None:
            whole = largest / FLOAT32.type(127)
            held = where_positive(np.inf - whole, np.minimum(whole, LARGEST), whole)
            kept = where_positive(np.sign(held - LEAST) + 1, held, 0)  # held >= LEAST
            found = where_positive(1.0 - np.absolute(held - held), kept, np.nan)
            largest[...] = found
            sent[...] = found

        return trace(scale, [FLOAT32] * 2, {1: Layout(row=1, step=self._row // FLOAT32.itemsize, one=True)})

    @cached_property
    def codes(self) -> Made:
        """values, scales, codes where they travel, residual."""

        def encode(values: Any, scale: Any, codes: Any, *owed: Any) -> None:
            total = self._total(values, owed)
            code = rounded(total * where_positive(scale, FLOAT32.type(1) / scale, 0), CODE)
            codes[...] = code
            for residual in owed:
                residual[...] = finite(total - code.astype(FLOAT32) * scale)

        layouts = {1: Layout(row=self.block, step=1, one=True), 2: Layout(row=self.block, step=self._row)}
        return trace(encode, [self.dtype, FLOAT32, CODE, *self._owed], layouts)

    @cached_property
    def decodings(self) -> tuple[Made, Made]:
        """out, scales, codes, where they travel: the values are written; and they are added."""
        wide = sum_dtype(self.dtype)

        def value(scale: Any, codes: Any) -> Any:
            return (codes.astype(FLOAT32) * scale).astype(wide, copy=False)

        def write(out: Any, scale: Any, codes: Any) -> None:
            out[...] = value(scale, codes)

        def add(out: Any, scale: Any, codes: Any) -> None:
            out += value(scale, codes)

        layouts = {
            1: Layout(row=self.block, step=self._row // FLOAT32.itemsize, one=True),
            2: Layout(row=self.block, step=self._row),
        }
        dtypes = [wide, FLOAT32, CODE]
        return trace(write, dtypes, layouts), trace(add, dtypes, layouts)

    def _of_data(self, data: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        """Scales from the first one on, codes from the first one on."""
        scales = data[: data.size // FLOAT32.itemsize * FLOAT32.itemsize].view(FLOAT32)
        return scales, data[FLOAT32.itemsize :].view(CODE)

    def encode(self, space: DeviceSpace, pieces: Sequence[Pushed]) -> None:
        """See `OnDevice`."""
        made = [
            (
                one,
                space.empty(-(-one.values.size // GROUP), FLOAT32),
                space.empty(-(-one.values.size // self.block), FLOAT32),
                *self._of_data(one.data),
            )
            for one in pieces
            if one.values.size
        ]
        for (program, numbers), runs in (
            (self.magnitudes, [[one.values, groups, *one.owed] for one, groups, *_ in made]),
            (self.largest, [[groups, blocks] for _, groups, blocks, *_ in made]),
            (self.scales, [[blocks, scales] for _, _, blocks, scales, _ in made]),
            (self.codes, [[one.values, blocks, codes, *one.owed] for one, _, blocks, _, codes in made]),
        ):
            space.launch_many(program, [(arrays, numbers) for arrays in runs])

    def decode(self, space: DeviceSpace, data: DeviceArray, out: DeviceArray, *, add: bool) -> None:
        """See `OnDevice`."""
        if out.size:
            program, numbers = self.decodings[add]
            space.launch(program, [out, *self._of_data(data)], numbers)
