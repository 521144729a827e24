"""Integer-valued arrays whose sum over the ranks is known exactly, in every dtype.

Element i of rank r is `i % period + r % 3 + 1`, so the sum over p ranks is `p * (i % period) + sum of (r % 3 + 1)`. The
period is as long as the sum stays below the largest number up to which the dtype holds every integer, so that a sum is
right in any order of adding or wrong. Filling and checking go block by block, so that neither needs memory of the
array's size nor leaves more than the array itself in the caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.spaces.gpu import Gpu

# All integers up to here are exact: two to the power of the digits of the significand.
EXACT = {"float16": 2048, "bfloat16": 256, "float32": 1 << 24, "float64": 1 << 53}
LONGEST_PERIOD = 13  # prime, so that no chunk or segment of a power of two looks like the one beside it
BLOCK_ELEMS = LONGEST_PERIOD * 1260  # a multiple of every number up to 10, and small enough for a core's cache


class Pattern:
    """The values of rank `rank` of `size` in `dtype`, and their sum, in host memory.

    Raises ValueError where no exact sum exists.
    """

    def __init__(self, dtype: np.dtype[np.generic], rank: int, size: int) -> None:
        offset = sum(other % 3 + 1 for other in range(size))
        limit = EXACT.get(dtype.name, 1 << 31)
        period = min(LONGEST_PERIOD, (limit - offset) // size + 1)
        if period < 1:
            raise ValueError(f"the sum over {size} ranks cannot be checked in {dtype.name}; choose a wider dtype")
        index = np.arange(BLOCK_ELEMS // period * period) % period
        self.mine: HostArray = (index + rank % 3 + 1).astype(dtype)
        self.total: HostArray = (index * size + offset).astype(dtype)

    def zeros(self, shape: tuple[int, ...]) -> HostArray:
        array: HostArray = np.zeros(shape, self.mine.dtype)
        return array

    def finish(self) -> None:
        """Wait for all that was begun with arrays, in calls of the store, too: for nothing, in host memory."""

    def fill(self, array: HostArray, sign: int = 1) -> None:
        """Write this rank's values, times `sign`, which may be 0, into `array`, contiguous and of any shape."""
        block = self.mine if sign == 1 else self.mine * self.mine.dtype.type(sign)
        for some in _blocks(array, block.size):
            some[...] = block[: some.size]

    def is_total(self, array: HostArray, factor: int = 1) -> bool:
        """Whether `array` holds the sum over all ranks, times `factor`, exactly."""
        block = self.total if factor == 1 else self.total * self.total.dtype.type(factor)
        return all(np.array_equal(some, block[: some.size]) for some in _blocks(array, block.size))


class GpuPattern(Pattern):
    """A pattern for arrays on a GPU: they are filled from host memory, and compared there."""

    def __init__(self, gpu: Gpu, dtype: np.dtype[np.generic], rank: int, size: int) -> None:
        super().__init__(dtype, rank, size)
        gpu.take()  # a benchmark's thread is its own
        self._cupy = gpu.cupy

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self._cupy.zeros(shape, self.mine.dtype)

    def fill(self, array: Any, sign: int = 1) -> None:
        values = super().zeros(array.shape)
        super().fill(values, sign)
        array.set(values)

    def is_total(self, array: Any, factor: int = 1) -> bool:
        # What a pull of a key in host memory returns is there already.
        return super().is_total(array if isinstance(array, np.ndarray) else array.get(), factor)

    def finish(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


def _blocks(array: HostArray, elems: int) -> Iterator[HostArray]:
    flat = array.reshape(-1)
    return (flat[first : first + elems] for first in range(0, flat.size, elems))
