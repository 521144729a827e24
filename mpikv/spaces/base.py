"""What a space is: one kind of memory that keys' arrays are in, and how they get there and back.

A key's value, what is pushed to it and what becomes of that are flat arrays of the key's space: NumPy's in host memory,
CuPy's on a GPU. NumPy's functions work on both (`np.add(a, b, out=c)` of CuPy's arrays is CuPy's kernel), so that what
is computed is written once. What differs is here: a GPU does its work later, in the order of a stream. The space has
one stream of its own, and `here` makes it the one that this thread's work goes into.

What ranks send each other is host memory, and so is what those of a host share (hostmemory/). Every call is local.
Which space a key is in all workers agree on (named.py); the spaces are each worker's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation

SpaceArray = Any
"""An array of a space: NumPy's, or CuPy's."""

CallersArray = Any
"""An array of the caller's as `Space.callers` returns it."""


class Space(Protocol):
    """One kind of memory. Arrays are (n,) and contiguous where nothing else is said."""

    @property
    def device(self) -> int | None:
        """The number of the GPU whose memory it is, among those that this process sees; None: host memory."""
        ...

    def here(self) -> AbstractContextManager[Any]:
        """A context in which work on the space's arrays goes into its stream. The space's own methods enter it."""
        ...

    def settle(self) -> None:
        """Block until all that the store has begun is done. Memory that it reads or writes may be let go of then."""
        ...

    def stats(self) -> dict[str, int]:
        """What `store.stats()` says of it: copies between host and device."""
        ...

    def close(self) -> None:
        """Give memory back. Blocks until what was begun is done. Twice does nothing."""
        ...

    # --- between a caller's arrays, of any library, and this space

    def callers(self, arrays: Sequence[Any]) -> list[CallersArray]:
        """What a call knows of its arrays, for `total` now and `write` later, maybe in another thread.

        An array in host memory is returned itself. For one in device memory: an object of this space's that says where
        it is and how far the caller's own work on it, in this thread, has come by now.
        """
        ...

    def total(
        self, arrays: Sequence[CallersArray], what: str, *, on_device: bool, combine: np.ufunc = np.add
    ) -> SpaceArray:
        """The sum of one worker's arrays of a key, flat, in their dtype, in new memory of this space.

        See `arrays.sum_devices`. arrays: of `callers`, wherever they are. what: for errors.
        """
        ...

    def write(self, out: CallersArray, values: SpaceArray, what: str) -> None:
        """Copy values into an array of the caller's (of `callers`), of its own dtype and shape, wherever it is."""
        ...

    def in_place(self, array: CallersArray, what: str) -> SpaceArray | None:
        """A caller's array (of `callers`), flat, where it lies; None where it is elsewhere or has gaps.

        What is done with it from now on comes behind the caller's own work; `hand_back` ends it.
        """
        ...

    def lies_in(self, held: SpaceArray, array: CallersArray) -> bool:
        """Whether `held`, of an earlier `in_place`, lies in this array (of `callers`). If so it is as if new."""
        ...

    def hand_back(self, arrays: Sequence[CallersArray]) -> None:
        """Let what the caller does next with these arrays come behind what was done with them in place."""
        ...

    def arrived(self, array: SpaceArray) -> Operation:
        """A request that is done when what a caller has begun to write into an array is there."""
        ...

    def follow(self, *arrays: SpaceArray) -> None:
        """Let what comes next come behind what callers have begun to write into these. The space's methods do it."""
        ...

    # --- between the host and this space

    def to_host(self, array: SpaceArray) -> HostArray:
        """The values in host memory: a copy, or the same array where it is there. Blocks until they are there."""
        ...

    def from_host(self, values: HostArray) -> SpaceArray:
        """The values in this space: a copy, or the same array where it is in it. They may be changed afterwards."""
        ...

    # --- within it

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> SpaceArray:
        """New memory of any content."""
        ...

    def zeros(self, n_elems: int, dtype: np.dtype[Any]) -> SpaceArray:
        """New memory of zeros."""
        ...

    def copy(self, out: SpaceArray, values: SpaceArray | int) -> None:
        """Write values, of any dtype, into `out`, of the same length; or one number."""
        ...

    def cast(self, values: SpaceArray, dtype: np.dtype[Any]) -> SpaceArray:
        """The values in another dtype: a copy, or the same array where it has it already."""
        ...

    def scale(self, values: SpaceArray, factor: float, out: SpaceArray) -> None:
        """Write the values, floating point numbers, times `factor` in their dtype into `out`."""
        ...
