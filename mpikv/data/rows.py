"""`Rows`: several arrays, one after another along their first axis, used as one without copying them together.

So the five files of CIFAR-10's training images are one memory-mapped array. What is asked for is copied, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpikv.common import checks


class Rows:
    """The rows of all `arrays`, which have the same shape but for the first axis, and the same dtype.

    dtype: what the rows become when they are taken; None leaves theirs. `rows[i]`, `rows[start:stop:step]` and
    `rows[array of whole numbers]` are new arrays; negative numbers count from the end. Raises IndexError beyond.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]], dtype: DTypeLike | None = None) -> None:
        kinds = {(array.shape[1:], array.dtype) for array in arrays}
        if len(kinds) != 1:
            raise ValueError(f"arrays to be one after another are of one shape and dtype, not {checks.shown(kinds)}")
        # Without the class `memmap`, which every slice of it would have, too.
        self._arrays = [np.asarray(array) for array in arrays]
        self._starts = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        self.dtype = self._arrays[0].dtype if dtype is None else np.dtype(dtype)
        self._length = sum(map(len, arrays))
        self.shape: tuple[int, ...] = (self._length, *self._arrays[0].shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, which: Any) -> NDArray[Any]:
        if isinstance(which, slice):
            return self.take(np.arange(*which.indices(len(self))))
        indices = np.asarray(which)
        if indices.ndim == 0:
            found: NDArray[Any] = self.take(np.array([checks.whole("a row", which, None)]))[0]
            return found
        return self.take(indices)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def take(self, indices: NDArray[Any]) -> NDArray[Any]:
        """Return the rows of these numbers: indices (n,), result (n, ...), in memory of its own."""
        wanted = np.asarray(indices, dtype=np.int64)
        n = len(self)
        outside = (wanted < -n) | (wanted >= n)
        if outside.any():
            raise IndexError(f"row {wanted[outside][0]} of {n}")
        wanted = np.where(wanted < 0, wanted + n, wanted)
        if len(self._arrays) == 1:
            return self._arrays[0][wanted].astype(self.dtype, copy=False)
        found = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        source = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(source):
            mine = source == number
            found[mine] = self._arrays[number][wanted[mine] - self._starts[number]]
        return found
