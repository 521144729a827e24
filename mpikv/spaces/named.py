"""The spaces of one worker by their names, under which workers agree at `init` on where a key's arrays are.

There are two names: "host", which every worker has, and "device" for the memory of the GPU that it uses. Keys of both
live side by side in one store, and each takes a caller's arrays from wherever they are.
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
from mpikv.spaces.callers import Caller
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.folded import sum_of_squares
from mpikv.spaces.host import HostSpace

HOST, DEVICE = "host", "device"


@dataclass(frozen=True)
class Spaces:
    """Those that one worker has. device: None where it uses none.

    of_new_keys: where keys are that are initialised from now on; None: where their first values are. Without a device
    all are in host memory. missing: why there is no device, for errors.
    """

    host: Space = field(default_factory=HostSpace)
    device: DeviceSpace | None = None
    of_new_keys: str | None = None
    missing: str = "none was looked for"

    def of(self, info: KeyInfo) -> Space:
        """The space that was agreed on for a key. UnsupportedError where this worker has none of its name."""
        if info.space == HOST:
            return self.host
        if self.device is None:
            raise UnsupportedError(f"key {shown(info.key)} is in device memory, and this worker uses no device")
        return self.device

    def of_new_key(self, first: CallersArray) -> str:
        """The name of the space of a key with this first value, one of `callers`."""
        if self.device is None:
            return HOST
        return self.of_new_keys or (DEVICE if isinstance(first, Caller) else HOST)

    def here(self) -> AbstractContextManager[Any]:
        """See `Space.here`: of the device, where there is one."""
        return (self.host if self.device is None else self.device).here()

    def stats(self) -> dict[str, int]:
        """Copies between host and device, and the memory held there; nothing where there is no device."""
        return {} if self.device is None else self.device.stats()

    def close(self) -> None:
        """Give the device's memory back. Blocks until what was begun there is done."""
        if self.device is not None:
            self.device.close()

    # --- a caller's arrays, for keys of any space

    def callers(self, arrays: Sequence[Any]) -> list[CallersArray]:
        """What a call knows of its arrays, for `total` now and `write` later. In the thread that makes the call."""
        if self.device is None:
            return self.host.callers(arrays)
        return self.device.callers(arrays)

    def total(
        self, space: str, arrays: Sequence[CallersArray], what: str, *, on_device: bool, combine: np.ufunc = np.add
    ) -> SpaceArray:
        """The sum of one worker's arrays of a key in the space of this name (`Space.total`). arrays: of `callers`."""
        device = self.device
        if device is None or (space == HOST and not any(isinstance(array, Caller) for array in arrays)):
            return self.host.total(arrays, what, on_device=on_device, combine=combine)
        if space == DEVICE or all(isinstance(array, Caller) for array in arrays):
            total = device.total(arrays, what, on_device=on_device, combine=combine)
            return total if space == DEVICE else device.to_host(total)
        flat = [
            device.to_host(device.total([array], what, on_device=on_device))
            if isinstance(array, Caller)
            else np.asarray(host_view(array, what)).reshape(-1)  # a reshaped np.matrix has two axes
            for array in arrays
        ]
        return self.host.total(flat, what, on_device=on_device, combine=combine)

    def write(self, space: str, out: CallersArray, values: SpaceArray, what: str) -> None:
        """Copy values of a key in the space of this name into an array of the caller's, one of `callers`."""
        if self.device is None or (space == HOST and not isinstance(out, Caller)):
            self.host.write(out, values, what)
            return
        there = values if space == DEVICE else self.device.from_host(values)
        self.device.write(out, there, what)

    # --- a caller's arrays where they lie, for what workers do by themselves

    def named(self, name: str) -> Space:
        """The space of this name, which one of `where`'s is."""
        return self.host if name == HOST or self.device is None else self.device

    def where(self, array: CallersArray) -> str:
        """The name of the space that an array (of `callers`) is in or next to."""
        return DEVICE if isinstance(array, Caller) else HOST

    def in_place(self, space: str, array: CallersArray, what: str) -> SpaceArray | None:
        """See `Space.in_place`. None, too, where the array is in another space than the one of this name."""
        if self.device is None:
            return self.host.in_place(array, what)
        return self.named(space).in_place(array, what) if self.where(array) == space else None

    def lies_in(self, space: str, held: SpaceArray, array: CallersArray) -> bool:
        """See `Space.lies_in`."""
        if self.device is None:
            return self.host.lies_in(held, array)
        return self.where(array) == space and self.named(space).lies_in(held, array)

    def hand_back(self, arrays: Sequence[CallersArray]) -> None:
        """See `Space.hand_back`. arrays: in any space."""
        if self.device is not None:
            self.device.hand_back(arrays)

    def scale(self, array: Any, factor: float, what: str) -> None:
        """Multiply an array of the caller's, of any library, by a number: in the dtype of its sums, rounded once."""
        (caller,) = self.callers([array])
        name = self.where(caller)
        space, values = self.named(name), self.total(name, [caller], what, on_device=True)
        wide = space.cast(values, sum_dtype(values.dtype))
        space.scale(wide, factor, wide)
        self.write(name, caller, wide, what)

    def sums_of_squares(self, arrays: Sequence[Any], what: Sequence[str]) -> list[float]:
        """For each array of the caller's: the sum of its squares in float64, wherever it is. Blocks."""
        callers = self.callers(arrays)
        there = [i for i, caller in enumerate(callers) if self.where(caller) == DEVICE]
        found = [0.0] * len(arrays)
        if there and (space := self.device) is not None:
            flat: list[SpaceArray] = []
            for i in there:
                placed = space.in_place(callers[i], what[i])
                flat.append(space.total([callers[i]], what[i], on_device=True) if placed is None else placed)
            space.follow(*flat)
            with space.here():
                sums = np.stack([sum_of_squares(one) for one in flat])
            for i, one in zip(there, space.to_host(sums), strict=True):
                found[i] = float(one)
            self.hand_back(callers)
        for i, caller in enumerate(callers):
            if self.where(caller) == HOST:
                found[i] = float(sum_of_squares(host_view(caller, what[i]).reshape(-1)))
        return found
