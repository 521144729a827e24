"""What codecs have in common that work on a block of a piece at a time.

A pass of NumPy over a long array waits for memory, and one over a block that stays in a core's cache does not. So each
of these codecs does all its passes over one block before it goes on to the next. On a GPU all is one block. Values are
taken as float32: float64 is rounded to it, which is what travels in any case; float16 and bfloat16 are widened.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

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
    """Return how many of n elements are worked on at a time: on a GPU all, since each block would be launches more."""
    return min(n_elems, step) if isinstance(array, np.ndarray) else n_elems


def empty(array: HostArray, n_elems: int, dtype: Any) -> HostArray:
    """Return new memory where `array` is."""
    if isinstance(array, np.ndarray):  # in half the time
        return np.empty(n_elems, dtype)
    return np.empty_like(array, dtype, shape=(n_elems,))


def as_float32(values: HostArray) -> HostArray:
    """Return the values in float32; themselves where they are. What float32 cannot hold becomes infinite."""
    if values.dtype == FLOAT32:
        return values
    with np.errstate(over="ignore"):
        return values.astype(FLOAT32)


def residual_of(n_elems: int) -> State:
    """Return the state of a piece of which nothing is owed yet."""
    return {"residual": np.zeros(n_elems, FLOAT32)}


def forget_what_is_not_finite(residual: HostArray) -> None:
    """Set what is NaN or infinite to 0: no later push could make up for it, and it would stay for ever."""
    if not compiled.run("finite", residual):
        finite = np.isfinite(residual)
        if not (isinstance(finite, np.ndarray) and finite.all()):
            np.copyto(residual, np.float32(0), where=~finite)


def positive(what: str, value: object) -> float:
    """Check a number that is more than 0, in float32, too. Raises ValueError or TypeError."""
    found = number(what, value)
    with np.errstate(over="ignore"):
        rounded = np.float32(found)
    if not (0 < rounded < np.inf):
        raise ValueError(f"{what} must be more than 0, and fit into float32, not {found:g}")
    return found


class InBlocks(Codec):
    """A codec that decodes block by block."""

    @abstractmethod
    def blocks(self, data: HostArray, n_elems: int) -> Iterator[tuple[slice, HostArray]]:
        """Yield where each block belongs, and its values, which are good until the next one is asked for."""

    def run(self, data: HostArray, factor: float, *, fresh: bool, out: HostArray) -> bool:
        """Add the values times `factor`, 1 or -1, to `out` by a compiled loop. False, with nothing done: there is none.

        fresh: -0.0 is what they are added to, whatever `out` was. Such a sum is the value itself.
        """
        return False

    def decode(self, data: HostArray, out: HostArray) -> None:
        """Write each block."""
        for part, values in self._left(data, 1.0, fresh=True, out=out):
            out[part] = values

    def add(self, data: HostArray, out: HostArray) -> None:
        """Add each block while it is in the cache."""
        for part, values in self._left(data, 1.0, fresh=False, out=out):
            total = out[part]
            total += values

    def subtract(self, data: HostArray, out: HostArray) -> None:
        """Subtract each block while it is in the cache."""
        for part, values in self._left(data, -1.0, fresh=False, out=out):
            total = out[part]
            total -= values

    def _left(
        self, data: HostArray, factor: float, *, fresh: bool, out: HostArray
    ) -> Iterable[tuple[slice, HostArray]]:
        """Return the blocks that no compiled loop has done: none or all."""
        self.check(data, out.size)
        return () if self.run(data, factor, fresh=fresh, out=out) else self.blocks(data, out.size)


class Numbers(InBlocks):
    """A codec that sends a number for each value. float16 and bfloat16 are widened when they are added.

    The loops of those are compiled where `compiled.prepare` was called for fp16 and bf16.
    """

    def run(self, data: HostArray, factor: float, *, fresh: bool, out: HostArray) -> bool:
        """Each, widened."""
        loop = _LOOPS.get(data.dtype)
        return loop is not None and compiled.run(loop, data.view(np.uint16), np.float32(factor), fresh, out)

    def blocks(self, data: HostArray, n_elems: int) -> Iterator[tuple[slice, HostArray]]:
        """All in one: NumPy widens a few thousand at a time, in its own buffer. CuPy's sums have one dtype."""
        yield slice(n_elems), data if isinstance(data, np.ndarray) else data.astype(sum_dtype(data.dtype), copy=False)
