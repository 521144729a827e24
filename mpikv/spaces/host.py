"""Host memory: NumPy arrays. All work is done when a method returns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, host_view, is_elsewhere, sum_devices, write
from mpikv.arrays.compiled import cast_into
from mpikv.engine.operation import Done, Operation


class HostSpace:
    """The memory of this process. See `Space` for what each method does."""

    @property
    def device(self) -> None:
        """See `Space`."""

    def in_stream(self) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return nullcontext()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def stats(self) -> dict[str, int]:
        """No entries."""
        return {}

    def close(self) -> None:
        """Nothing to free: arrays are freed with their last reference."""

    def callers_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays themselves: they are written already, and reading a device array waits for its stream."""
        return list(arrays)

    def total(self, arrays: Sequence[Any], what: str, *, on_device: bool, combine: np.ufunc = np.add) -> HostArray:
        """See `Space`; device arrays are copied to the host."""
        return sum_devices(arrays, what, on_device=on_device, combine=combine)

    def write(self, out: Any, values: HostArray, what: str) -> None:
        """See `Space`."""
        write(out, values, what)

    def in_place(self, array: Any, what: str) -> HostArray | None:
        """See `Space`."""
        view = host_view(array, what)
        flat: HostArray = view.reshape(-1)
        if view is array and view.flags.c_contiguous:  # a fast path: nearly all arrays are
            return flat
        return flat if not is_elsewhere(array) and np.may_share_memory(flat, view) else None

    def is_view_of(self, held: HostArray, array: Any) -> bool:
        """See `Space`. `held` has no gaps, so comparing the bounds of memory is exact."""
        if not isinstance(array, np.ndarray):
            if is_elsewhere(array):
                return False
            array = host_view(array, "an array")
        return np.may_share_memory(held, array)

    def make_callers_wait(self, arrays: Sequence[Any]) -> None:
        """Nothing is under way."""

    def written(self, array: HostArray) -> Operation:
        """All writes are done."""
        return Done()

    def wait_for_callers(self, *arrays: HostArray) -> None:
        """All writes are done."""

    def to_host(self, array: HostArray) -> HostArray:
        """Return the array itself."""
        return array

    def from_host(self, values: HostArray) -> HostArray:
        """Return the array itself."""
        return values

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """See `Space`."""
        return np.empty(n_elems, dtype)

    def zeros(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """See `Space`."""
        return np.zeros(n_elems, dtype)

    def copy(self, out: HostArray, values: HostArray | int) -> None:
        """See `Space`."""
        if getattr(values, "dtype", None) == out.dtype:
            np.copyto(out, values)
        else:
            cast_into(out, values)

    def cast(self, values: HostArray, dtype: np.dtype[Any]) -> HostArray:
        """See `Space`."""
        if values.dtype == dtype:
            return values
        out: HostArray = np.empty(values.shape, dtype)
        cast_into(out, values)
        return out

    def scale(self, values: HostArray, factor: float, out: HostArray) -> None:
        """See `Space`."""
        np.multiply(values, values.dtype.type(factor), out=out)
