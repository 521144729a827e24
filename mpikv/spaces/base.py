"""What a space is: the kind of memory that a key's arrays are in, and how they are worked on there.

A store's values, what is pushed to it and what becomes of that are flat arrays of one space. Whoever needs memory for
them, copies, casts, adds or updates them asks the space; a part of an array is a slice, as everywhere. What ranks send
each other is host memory, and so is what those of a host share (hostmemory/).

Every call is local. A space is no part of what workers agree on: each worker has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpikv.arrays import HostArray

Formula = Callable[[HostArray, HostArray, Mapping[str, HostArray], "list[HostArray]"], None]
"""Changes a weight and the arrays of its state in place: (weight, gradient, arrays, temporaries)."""


class Space(Protocol):
    """One kind of memory. Arrays are (n,) and contiguous where nothing else is said."""

    # --- between a caller's arrays, of any library, and this space

    def ready(self, arrays: Sequence[Any]) -> None:
        """Order what the space does next behind what the caller has begun to write into `arrays`."""
        ...

    def total(self, arrays: Sequence[Any], what: str, *, on_device: bool, combine: np.ufunc = np.add) -> HostArray:
        """The sum of one worker's arrays of a key, flat, in their dtype, in new memory of this space.

        See `arrays.sum_devices`. what: for errors.
        """
        ...

    def write(self, out: Any, values: HostArray, what: str) -> None:
        """Copy values into an array of the caller's, of its own dtype and shape."""
        ...

    # --- within it

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """New memory of any content."""
        ...

    def zeros(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """New memory of zeros."""
        ...

    def copy(self, out: HostArray, values: HostArray | int) -> None:
        """Write values, of any dtype, into `out`, of the same length; or one number."""
        ...

    def cast(self, values: HostArray, dtype: np.dtype[Any]) -> HostArray:
        """The values in another dtype: a copy, or the same array where it has it already."""
        ...

    def combine(self, first: HostArray, second: HostArray, out: HostArray, how: np.ufunc) -> None:
        """Write `how(first, second)`, two arrays of one dtype, into `out`, which may be one of them."""
        ...

    def scale(self, values: HostArray, factor: float, out: HostArray) -> None:
        """Write the values, floating point numbers, times `factor` in their dtype into `out`."""
        ...

    def update(
        self,
        formula: Formula,
        weight: HostArray,
        terms: Sequence[HostArray],
        arrays: Mapping[str, HostArray],
        *,
        master: HostArray | None,
        dtype: np.dtype[Any],
        temporaries: int,
        elementwise: bool,
    ) -> None:
        """Run an optimizer's formula on a whole weight, with the sum of `terms` as its gradient.

        arrays: those of the state; master: the copy of the weight that the formula changes in its place, from which the
        weight is rounded. dtype: that of the formula's arithmetic. temporaries: how many arrays it needs. elementwise:
        whether it may be run on parts of the weight, one after another.
        """
        ...
