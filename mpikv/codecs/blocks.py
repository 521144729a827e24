"""The bases of codecs that work on one block of a piece at a time.

A pass of NumPy over a long array waits for memory; one over a block that stays in a core's cache does not. So all
passes are done over one block before the next. On a GPU the piece is one block. Values are taken as float32: float64 is
rounded to it, float16 and bfloat16 are widened.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpikv.arrays import compiled
from mpikv.arrays.as_numpy import BFLOAT16, HostArray, sum_dtype
from mpikv.codecs.base import Codec, State
from mpikv.common.checks import number

BLOCK_ELEMS = 1 << 15  # 128 KiB of float32: four such arrays are in the second cache of any core of these years
FLOAT32 = np.dtype(np.float32)
_LOOPS = {np.dtype(np.float16): "fp16 add", BFLOAT16: "bf16 add"}


def spans(n_elems: int, step: int) -> Iterator[slice]:
    """Cut n elements into blocks of `step`, the last one shorter."""
    for begin in range(0, n_elems, max(step, 1)):
        yield slice(begin, min(begin + step, n_elems))


def step_of(array: HostArray, n_elems: int, step: int = BLOCK_ELEMS) -> int:
    """Return how many of n elements a block has: on a GPU all, since each block needs launches of its own."""
    return min(n_elems, step) if isinstance(array, np.ndarray) else n_elems


def empty(array: HostArray, n_elems: int, dtype: Any) -> HostArray:
    """Return a new array in the memory that `array` is in: of the host, or of its GPU."""
    if isinstance(array, np.ndarray):  # takes half the time of `empty_like`
        return np.empty(n_elems, dtype)
    return np.empty_like(array, dtype, shape=(n_elems,))


def as_float32(values: HostArray) -> HostArray:
    """Return the values in float32: the same array, if it is float32. What float32 cannot hold becomes infinite."""
    if values.dtype == FLOAT32:
        return values
    with np.errstate(over="ignore"):
        return values.astype(FLOAT32)


def zero_non_finite(residual: HostArray) -> None:
    """Set NaN and infinities to 0: no later push could send them, so they would stay in the residual for ever."""
    if not compiled.run("finite", residual):
        finite = np.isfinite(residual)
        if not (isinstance(finite, np.ndarray) and finite.all()):
            np.copyto(residual, np.float32(0), where=~finite)


class InBlocks(Codec):
    """A codec that decodes block by block."""

    @abstractmethod
    def blocks(self, data: HostArray, n_elems: int) -> Iterator[tuple[slice, HostArray]]:
        """Yield the elements of each block, and its values, which are overwritten when the next block is asked for."""

    def run(self, data: HostArray, factor: float, *, fresh: bool, out: HostArray) -> bool:
        """Add the values times `factor`, 1 or -1, to `out` by a compiled loop. Returns False if there is no such loop.

        fresh: they are added to -0.0 in place of what is in `out`, so that the sum is the value itself.
        """
        return False

    def decode(self, data: HostArray, out: HostArray) -> None:
        for span, values in self._uncompiled(data, 1.0, fresh=True, out=out):
            out[span] = values

    def add(self, data: HostArray, out: HostArray) -> None:
        for span, values in self._uncompiled(data, 1.0, fresh=False, out=out):
            total = out[span]
            total += values

    def subtract(self, data: HostArray, out: HostArray) -> None:
        for span, values in self._uncompiled(data, -1.0, fresh=False, out=out):
            total = out[span]
            total -= values

    def _uncompiled(
        self, data: HostArray, factor: float, *, fresh: bool, out: HostArray
    ) -> Iterable[tuple[slice, HostArray]]:
        """Do the work by a compiled loop, and return no block; or return all blocks, if there is no such loop."""
        self.check(data, out.size)
        return () if self.run(data, factor, fresh=fresh, out=out) else self.blocks(data, out.size)


class Numbers(InBlocks):
    """Sends one number for each value. float16 and bfloat16 are widened when they are added."""

    def run(self, data: HostArray, factor: float, *, fresh: bool, out: HostArray) -> bool:
        loop = _LOOPS.get(data.dtype)
        return loop is not None and compiled.run(loop, data.view(np.uint16), np.float32(factor), fresh, out)

    def blocks(self, data: HostArray, n_elems: int) -> Iterator[tuple[slice, HostArray]]:
        """All as one block: NumPy widens them while it adds; for CuPy, which adds one dtype, they are cast."""
        yield slice(n_elems), data if isinstance(data, np.ndarray) else data.astype(sum_dtype(data.dtype), copy=False)


@dataclass(frozen=True)
class Threshold(InBlocks):
    """The base of MXNet's two codecs: a few bits for each value, and a residual, from which what is sent is subtracted.

    threshold: t. is_positive: whether it must be more than 0.
    """

    threshold: float = 0.5

    has_residual = on_device = True
    is_positive = True
    per_byte: ClassVar[int]  # how many values a byte holds

    def __post_init__(self) -> None:
        what, found = f"{self.name}: threshold", number(f"{self.name}: threshold", self.threshold)
        with np.errstate(over="ignore"):
            rounded = np.float32(found)
        if not np.isfinite(rounded) or (self.is_positive and rounded <= 0):
            positive = "be more than 0, and " if self.is_positive else ""
            raise ValueError(f"{what} must {positive}fit into float32, not {found:g}")
        object.__setattr__(self, "threshold", found)

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        return -(-n_elems // self.per_byte)

    def init(self, n_elems: int) -> State:
        return {"residual": np.zeros(n_elems, FLOAT32)}

    def encode(self, values: HostArray, state: State) -> HostArray:
        n, t = values.size, np.float32(self.threshold)
        data = empty(values, self.wire_bytes(n, values.dtype), np.uint8)
        if not compiled.run(self.name, values, state["residual"], t, data):
            with np.errstate(over="ignore", invalid="ignore"):
                self._encode(values, state["residual"], t, data)
        return data

    @abstractmethod
    def _encode(self, values: HostArray, residual: HostArray, t: Any, data: HostArray) -> None:
        """Add the values to `residual`, write its codes into `data`, and subtract what they decode to from it."""

    @abstractmethod
    def _decoded_bytes(self) -> HostArray:
        """Return the values of every byte, as one item each."""

    @abstractmethod
    def _unpacked(self, data: HostArray, n_elems: int) -> HostArray:
        """Return all values of a piece on a GPU, made of its bits: CuPy has no items of several values."""

    def blocks(self, data: HostArray, n_elems: int) -> Iterator[tuple[slice, HostArray]]:
        """Look up the values of each byte."""
        if not isinstance(data, np.ndarray):
            yield slice(n_elems), self._unpacked(data, n_elems)
            return
        table, step = self._decoded_bytes(), step_of(data, n_elems)
        items = np.empty(self.wire_bytes(step, FLOAT32), table.dtype)
        for span in spans(n_elems, step):
            found = data[span.start // self.per_byte : self.wire_bytes(span.stop, FLOAT32)]
            # no index is out of range; with mode "clip" `take` writes without a buffer of its own
            values = np.take(table, found, out=items[: found.size], mode="clip").view(FLOAT32)
            yield span, values[: span.stop - span.start]
