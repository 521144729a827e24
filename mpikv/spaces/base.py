"""The interface of a space: one kind of memory for keys' arrays, host or GPU, and how values get there and back.

A key's value, its gradients and their sums are flat arrays of the key's space: NumPy's in host memory, CuPy's on a GPU.
NumPy's functions work on both (`np.add(a, b, out=c)` of CuPy's arrays is CuPy's kernel), so that formulas are written
once. The methods here cover what differs: a GPU works asynchronously, in the order of a stream. A space on a GPU has
one stream of its own; in the context `in_stream` the calling thread's work goes into it.

Ranks send each other host memory, and the ranks of a host share host memory (hostmemory/). Every call is local. All
workers agree on the space of each key (named.py); the space objects are each worker's own.
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
"""An array of the caller's, as `Space.callers_arrays` returns it."""


class Space(Protocol):
    """One kind of memory. Arrays are (n,) and contiguous unless a method says otherwise."""

    @property
    def device(self) -> int | None:
        """The number of the GPU whose memory it is, among those that this process sees; None: host memory."""
        ...

    def in_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which work on arrays goes into the space's stream. The space's own methods enter it."""
        ...

    def synchronize(self) -> None:
        """Block until all work that the store has begun is done. Memory that it uses may be freed afterwards."""
        ...

    def stats(self) -> dict[str, int]:
        """Return the space's entries in `store.stats()`: copies between host and device."""
        ...

    def close(self) -> None:
        """Free the memory. Blocks until the work that was begun is done. A second call does nothing."""
        ...

    # --- between a caller's arrays, of any library, and this space

    def callers_arrays(self, arrays: Sequence[Any]) -> list[CallersArray]:
        """Describe the arrays of a call, for `total` now and `write` later, maybe in another thread.

        An array in host memory is returned itself. For one in device memory an object of this space is returned, which
        holds its address and an event after all work on it that the caller has begun in this thread.
        """
        ...

    def total(
        self, arrays: Sequence[CallersArray], what: str, *, on_device: bool, combine: np.ufunc = np.add
    ) -> SpaceArray:
        """Return the sum of one worker's arrays of a key, flat, in their dtype, in new memory of this space.

        See `arrays.sum_devices`. arrays: of `callers_arrays`, in any memory. what: what they are, for errors.
        """
        ...

    def write(self, out: CallersArray, values: SpaceArray, what: str) -> None:
        """Copy values into an array of the caller's (of `callers_arrays`), in its dtype and shape and in any memory."""
        ...

    def in_place(self, array: CallersArray, what: str) -> SpaceArray | None:
        """Return a flat view of a caller's array (of `callers_arrays`); None if it is in other memory or has gaps.

        Work on the view runs after the caller's own work on the array. Call `make_callers_wait` when it is begun.
        """
        ...

    def is_view_of(self, held: SpaceArray, array: CallersArray) -> bool:
        """Whether `held`, of an earlier `in_place`, is a view of this array (of `callers_arrays`).

        If so, work on `held` runs after the caller's work on the array until now, as on a new view.
        """
        ...

    def make_callers_wait(self, arrays: Sequence[CallersArray]) -> None:
        """Make the caller's next work on these arrays run after the store's work on views of them (`in_place`)."""
        ...

    def written(self, array: SpaceArray) -> Operation:
        """Return a request that is done when all writes into an array that a caller has begun are done."""
        ...

    def wait_for_callers(self, *arrays: SpaceArray) -> None:
        """Make the store's next work run after all writes into these that callers have begun. All methods call it."""
        ...

    # --- between the host and this space

    def to_host(self, array: SpaceArray) -> HostArray:
        """Return the values in host memory: a copy, or the same array if it is there. Blocks until they are there."""
        ...

    def from_host(self, values: HostArray) -> SpaceArray:
        """Return the values in this space: a copy, or the same array if it is in it. `values` may be changed then."""
        ...

    # --- within it

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> SpaceArray:
        """Return a new array, uninitialised."""
        ...

    def zeros(self, n_elems: int, dtype: np.dtype[Any]) -> SpaceArray:
        """Return a new array of zeros."""
        ...

    def copy(self, out: SpaceArray, values: SpaceArray | int) -> None:
        """Write values, of any dtype, into `out`, of the same length; or write one number into all of it."""
        ...

    def cast(self, values: SpaceArray, dtype: np.dtype[Any]) -> SpaceArray:
        """Return the values in another dtype: a copy, or the same array if it has this dtype."""
        ...

    def scale(self, values: SpaceArray, factor: float, out: SpaceArray) -> None:
        """Write the values, floating point numbers, times `factor` in their dtype into `out`."""
        ...
