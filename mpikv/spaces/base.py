"""A space: one kind of memory for keys' arrays, and how values get there and back. `Space` itself is host memory.

A key's value, its gradients and their sums are flat arrays of the key's space: NumPy's in host memory, CuPy's on a GPU
(device.py). NumPy's functions work on both (`np.add(a, b, out=c)` of CuPy's arrays is CuPy's kernel), so that formulas
are written once. The methods here cover what differs: a GPU works asynchronously, in the order of a stream. A space on
a GPU has one stream of its own; in the context `in_stream` the calling thread's work goes into it. In host memory all
work is done when a method returns.

Every call is local. All workers agree on the space of each key (named.py); the space objects are each worker's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, host_view, is_elsewhere, sum_devices, write
from mpikv.arrays.compiled import cast_into
from mpikv.engine.operation import Done, Operation

SpaceArray = Any
"""An array of a space: NumPy's, or CuPy's."""

CallersArray = Any
"""An array of the caller's, as `Space.callers_arrays` returns it."""


class Space:
    """The memory of this process. Arrays are (n,) and contiguous unless a method says otherwise."""

    @property
    def device(self) -> int | None:
        """The number of the GPU whose memory it is, among those that this process sees; None: host memory."""
        return None

    def in_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which work on arrays goes into the space's stream. The space's own methods enter it."""
        return nullcontext()

    def synchronize(self) -> None:
        """Block until all work that the store has begun is done. Memory that it uses may be freed afterwards."""

    def stats(self) -> dict[str, int]:
        """Return the space's entries in `store.stats()`: copies between host and device."""
        return {}

    def close(self) -> None:
        """Free the memory. Blocks until the work that was begun is done. A second call does nothing."""

    # --- between a caller's arrays, of any library, and this space

    def callers_arrays(self, arrays: Sequence[Any]) -> list[CallersArray]:
        """Describe the arrays of a call, for `total` now and `write` later, maybe in another thread.

        An array in host memory is returned itself. For one in device memory a space on a GPU returns an object that
        holds its address and an event after all work on it that the caller has begun in this thread.
        """
        return list(arrays)

    def total(
        self, arrays: Sequence[CallersArray], what: str, *, on_device: bool, combine: np.ufunc = np.add
    ) -> SpaceArray:
        """Return the sum of one worker's arrays of a key, flat, in their dtype, in new memory of this space.

        See `arrays.sum_devices`. arrays: of `callers_arrays`, in any memory. what: what they are, for errors.
        """
        return sum_devices(arrays, what, on_device=on_device, combine=combine)

    def write(self, out: CallersArray, values: SpaceArray, what: str) -> None:
        """Copy values into an array of the caller's (of `callers_arrays`), in its dtype and shape and in any memory."""
        write(out, values, what)

    def in_place(self, array: CallersArray, what: str) -> SpaceArray | None:
        """Return a flat view of a caller's array (of `callers_arrays`); None if it is in other memory or has gaps.

        Work on the view runs after the caller's own work on the array. Call `make_callers_wait` when it is begun.
        """
        view = host_view(array, what)
        flat: HostArray = view.reshape(-1)
        if view is array and view.flags.c_contiguous:  # a fast path: nearly all arrays are
            return flat
        return flat if not is_elsewhere(array) and np.may_share_memory(flat, view) else None

    def is_view_of(self, held: SpaceArray, array: CallersArray) -> bool:
        """Whether `held`, of an earlier `in_place`, is a view of this array (of `callers_arrays`).

        If so, work on `held` runs after the caller's work on the array until now, as on a new view.
        """
        if not isinstance(array, np.ndarray):
            if is_elsewhere(array):
                return False
            array = host_view(array, "an array")
        return np.may_share_memory(held, array)  # `held` has no gaps, so comparing the bounds of memory is exact

    def make_callers_wait(self, arrays: Sequence[CallersArray]) -> None:
        """Make the caller's next work on these arrays run after the store's work on views of them (`in_place`)."""

    def written(self, array: SpaceArray) -> Operation:
        """Return a request that is done when all writes into an array that a caller has begun are done."""
        return Done()

    def wait_for_callers(self, *arrays: SpaceArray) -> None:
        """Make the store's next work run after all writes into these that callers have begun. All methods call it."""

    # --- between the host and this space

    def to_host(self, array: SpaceArray) -> HostArray:
        """Return the values in host memory: a copy, or the same array if it is there. Blocks until they are there."""
        host: HostArray = array
        return host

    def from_host(self, values: HostArray) -> SpaceArray:
        """Return the values in this space: a copy, or the same array if it is in it. `values` may be changed then."""
        return values

    # --- within it

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> SpaceArray:
        return np.empty(n_elems, dtype)

    def zeros(self, n_elems: int, dtype: np.dtype[Any]) -> SpaceArray:
        return np.zeros(n_elems, dtype)

    def copy(self, out: SpaceArray, values: SpaceArray | int) -> None:
        """Write values, of any dtype, into `out`, of the same length; or write one number into all of it."""
        if getattr(values, "dtype", None) == out.dtype:
            np.copyto(out, values)
        else:
            cast_into(out, values)

    def cast(self, values: SpaceArray, dtype: np.dtype[Any]) -> SpaceArray:
        """Return the values in another dtype: a copy, or the same array if it has this dtype."""
        if values.dtype == dtype:
            return values
        out: HostArray = np.empty(values.shape, dtype)
        cast_into(out, values)
        return out

    def scale(self, values: SpaceArray, factor: float, out: SpaceArray) -> None:
        """Write the values, floating point numbers, times `factor` in their dtype into `out`."""
        np.multiply(values, values.dtype.type(factor), out=out)
