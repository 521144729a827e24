"""The spaces of one worker by name. At `init` workers agree on the name of the space that holds a key's arrays.

There are two names: "host", which every worker has, and "device", the memory of the GPU that it uses. One store can
have keys of both. A key of either accepts a caller's arrays in any memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import host_view, sum_dtype
from mpikv.common.checks import shown
from mpikv.errors import UnsupportedError
from mpikv.placement.keys import KeyInfo
from mpikv.spaces.base import CallersArray, Space, SpaceArray
from mpikv.spaces.callers import CallersGpuArray
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.folded import sum_of_squares

HOST, DEVICE = "host", "device"


@dataclass(frozen=True)
class Spaces:
    """The spaces of one worker. device: None if it uses no GPU.

    of_new_keys: the space of keys that are initialised from now on; None: the space that their first values are in.
    Without a device all keys are in host memory. missing: why there is no device, for errors.
    """

    host: Space = field(default_factory=Space)
    device: DeviceSpace | None = None
    of_new_keys: str | None = None
    missing: str = "none was looked for"

    def of(self, info: KeyInfo) -> Space:
        if info.space == HOST:
            return self.host
        if self.device is None:
            raise UnsupportedError(f"key {shown(info.key)} is in device memory, and this worker uses no device")
        return self.device

    def of_new_key(self, first: CallersArray, *, as_given: bool = False) -> str:
        """Name the space of a key with this first value. as_given: that of the value, whatever all keys have."""
        if self.device is None or self.of_new_keys == HOST:
            return HOST
        in_space = self.space_of(first)
        return in_space if as_given else self.of_new_keys or in_space

    @property
    def _of_callers(self) -> Space:
        """The one that knows arrays in any memory that callers may have."""
        return self.host if self.device is None else self.device

    def in_stream(self) -> AbstractContextManager[Any]:
        return self._of_callers.in_stream()

    def stats(self) -> dict[str, int]:
        return self._of_callers.stats()

    def close(self) -> None:
        self._of_callers.close()

    # --- a caller's arrays, for keys of any space

    def callers_arrays(self, arrays: Sequence[Any]) -> list[CallersArray]:
        """See `Space.callers_arrays`. To be called in the thread that makes the store's call."""
        return self._of_callers.callers_arrays(arrays)

    def total(
        self, space: str, arrays: Sequence[CallersArray], what: str, *, on_device: bool, combine: np.ufunc = np.add
    ) -> SpaceArray:
        """Return the sum of one worker's arrays of a key, in the space of this name. See `Space.total`."""
        device = self.device
        if device is None or (space == HOST and not any(isinstance(array, CallersGpuArray) for array in arrays)):
            return self.host.total(arrays, what, on_device=on_device, combine=combine)
        if space == DEVICE or all(isinstance(array, CallersGpuArray) for array in arrays):
            total = device.total(arrays, what, on_device=on_device, combine=combine)
            return total if space == DEVICE else device.to_host(total)
        flat = [
            device.to_host(device.total([array], what, on_device=on_device))
            if isinstance(array, CallersGpuArray)
            else np.asarray(host_view(array, what)).reshape(-1)  # a reshaped np.matrix has two axes
            for array in arrays
        ]
        return self.host.total(flat, what, on_device=on_device, combine=combine)

    def write(self, space: str, out: CallersArray, values: SpaceArray, what: str) -> None:
        """Copy values of a key in the space of this name into an array of the caller's (of `callers_arrays`)."""
        if self.device is None or (space == HOST and not isinstance(out, CallersGpuArray)):
            self.host.write(out, values, what)
            return
        on_device = values if space == DEVICE else self.device.from_host(values)
        self.device.write(out, on_device, what)

    # --- a caller's arrays in place, for work that a worker does by itself

    def by_name(self, name: str) -> Space:
        return self.host if name == HOST or self.device is None else self.device

    def space_of(self, array: CallersArray) -> str:
        """Return the name of the space that an array (of `callers_arrays`) is in; "device" on another GPU, too."""
        return DEVICE if isinstance(array, CallersGpuArray) else HOST

    def in_place(self, space: str, array: CallersArray, what: str) -> SpaceArray | None:
        """See `Space.in_place`. Returns None, too, if the array is not in the space of this name."""
        if self.device is None:
            return self.host.in_place(array, what)
        return self.by_name(space).in_place(array, what) if self.space_of(array) == space else None

    def is_view_of(self, space: str, held: SpaceArray, array: CallersArray) -> bool:
        if self.device is None:
            return self.host.is_view_of(held, array)
        return self.space_of(array) == space and self.by_name(space).is_view_of(held, array)

    def make_callers_wait(self, arrays: Sequence[CallersArray]) -> None:
        """See `Space.make_callers_wait`. arrays: in any space."""
        self._of_callers.make_callers_wait(arrays)

    def scale(self, array: Any, factor: float, what: str) -> None:
        """Multiply an array of the caller's, of any library, by a number: in the dtype of sums, rounded once."""
        (caller,) = self.callers_arrays([array])
        name = self.space_of(caller)
        space, values = self.by_name(name), self.total(name, [caller], what, on_device=True)
        wide = space.cast(values, sum_dtype(values.dtype))
        space.scale(wide, factor, wide)
        self.write(name, caller, wide, what)

    def sums_of_squares(self, arrays: Sequence[Any], what: Sequence[str]) -> list[float]:
        """Return the sum of squares, in float64, of each array of the caller's, in any memory. Blocks."""
        callers = self.callers_arrays(arrays)
        on_device = [i for i, caller in enumerate(callers) if self.space_of(caller) == DEVICE]
        found = [0.0] * len(arrays)
        if on_device and (space := self.device) is not None:
            flat: list[SpaceArray] = []
            for i in on_device:
                view = space.in_place(callers[i], what[i])
                flat.append(space.total([callers[i]], what[i], on_device=True) if view is None else view)
            space.wait_for_callers(*flat)
            with space.in_stream():
                sums = np.stack([sum_of_squares(one) for one in flat])
            for i, one in zip(on_device, space.to_host(sums), strict=True):
                found[i] = float(one)
            self.make_callers_wait(callers)
        for i, caller in enumerate(callers):
            if self.space_of(caller) == HOST:
                found[i] = float(sum_of_squares(host_view(caller, what[i]).reshape(-1)))
        return found
