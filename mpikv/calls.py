"""The forms of a call: one key or a list, one array or one per device, a key repeated in a list.

Each becomes a list of items, one per key, in the order of first appearance; shapes and dtypes are checked, and the
arrays of this worker's devices are added up, so that a strategy sees one flat array per key. Everything of a call is
checked before anything is sent. Local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays import check_writable, host_view, is_array, is_device, shape_and_dtype, sum_devices
from mpikv.checks import shown
from mpikv.errors import KeyNotInitialized, ShapeMismatch
from mpikv.keys import Key, KeyInfo, check_key
from mpikv.strategies.base import PreparedCall, Strategy

Array = Any  # NumPy, CuPy, or anything with DLPack
Keys = Key | Sequence[Key]
Values = Any  # an array, a list of arrays (one per device), or a list of either (one per key)
Targets = list[tuple[KeyInfo, list[Array]]]


class Item(NamedTuple):
    """A key of a call and all arrays that the call has for it."""

    key: Key
    arrays: list[Array]


class CallForms:
    """What the arguments of a store's calls mean. on_device: whether devices are summed on the first of them."""

    def __init__(self, strategy: Strategy, *, on_device: bool) -> None:
        self._strategy = strategy
        self._on_device = on_device
        self.key_type: type | None = None  # of all keys of the store, once there are any

    def where(self) -> str:
        """This worker, for errors."""
        return f"worker {self._strategy.rank} of {self._strategy.num_workers}"

    def key(self, key: Any) -> Key:
        """The key itself. TypeError for what is none, or one of the other kind than the store's keys."""
        checked = check_key(key)
        if self.key_type is not None and type(checked) is not self.key_type:
            raise TypeError(
                f"key {shown(checked)} is {type(checked).__name__}, but the keys of this store are "
                f"{self.key_type.__name__}; a store does not mix them"
            )
        return checked

    def items(self, call: str, keys: Keys, values: Values) -> list[Item]:
        """One item per key, in the order of first appearance, with all arrays of that key."""
        if not isinstance(keys, (list, tuple)):
            keys, values = [keys], [values]  # type: ignore[list-item]
        elif not isinstance(values, (list, tuple)):
            raise TypeError(f"{call}: a list of keys needs a list of values, not {type(values).__name__}")
        if len(keys) != len(values):
            raise ValueError(f"{call}: {len(keys)} keys but {len(values)} values")
        found: dict[Key, list[Array]] = {}
        for key, value in zip(keys, values, strict=True):
            arrays = list(value) if isinstance(value, (list, tuple)) else [value]
            if not arrays:
                raise ValueError(f"{call}: key {shown(key)} has an empty list of arrays")
            checked = self.key(key)
            for array in arrays:
                if not is_array(array):
                    raise TypeError(
                        f"{call}: the value of key {shown(key)} is {type(array).__name__}, "
                        "not an array (NumPy, CuPy or anything with DLPack)"
                    )
            found.setdefault(checked, []).extend(arrays)
        return [Item(key, arrays) for key, arrays in found.items()]

    def info(self, call: str, key: Key) -> KeyInfo:
        """What is known of a key. KeyNotInitialized where that is nothing."""
        info = self._strategy.lookup(key)
        if info is None:
            known = [entry.key for entry in self._strategy.infos()]
            some = ", ".join(shown(entry) for entry in known[:8]) + (", ..." if len(known) > 8 else "")
            raise KeyNotInitialized(
                f"{call}: key {shown(key)} was never initialised ({self.where()}); "
                + (f"the store holds {some}" if known else "the store holds no key")
            )
        return info

    def check_value(self, call: str, info: KeyInfo, array: Array, *, dtype: bool) -> None:
        """ShapeMismatch where an array has another shape than the key, or (dtype=True) another dtype."""
        shape, found = shape_and_dtype(array, f"{call}: the value of key {shown(info.key)}")
        if shape != info.shape or (dtype and found != info.dtype):
            raise ShapeMismatch(
                f"{call}: key {shown(info.key)} is {info.dtype} {info.shape}, this array is {found} {shape} "
                f"({self.where()}); nothing was sent"
            )

    def totals(self, call: str, items: list[Item]) -> list[tuple[KeyInfo, np.ndarray[Any, Any]]]:
        """Check everything, then sum over devices; so an error leaves nothing half sent."""
        infos = [self.info(call, item.key) for item in items]
        for info, item in zip(infos, items, strict=True):
            for array in item.arrays:
                self.check_value(call, info, array, dtype=True)
        return [
            (info, sum_devices(item.arrays, f"{call}: the value of key {shown(info.key)}", on_device=self._on_device))
            for info, item in zip(infos, items, strict=True)
        ]

    def outs(self, call: str, keys: Keys, out: Values) -> tuple[Targets, Any]:
        """The arrays to write into for each key; new ones, and what to return, where `out` is None."""
        if out is None:
            wanted = list(keys) if isinstance(keys, (list, tuple)) else [keys]
            infos = [self.info(call, self.key(key)) for key in wanted]
            arrays = [np.empty(info.shape, info.dtype) for info in infos]
            grouped: dict[int, tuple[KeyInfo, list[Array]]] = {}
            for info, array in zip(infos, arrays, strict=True):
                grouped.setdefault(info.id, (info, []))[1].append(array)
            return list(grouped.values()), arrays if isinstance(keys, (list, tuple)) else arrays[0]
        targets = []
        for item in self.items(call, keys, out):
            info = self.info(call, item.key)
            for array in item.arrays:
                check_writable(array, f"{call}: out of key {shown(item.key)}")
                self.check_value(call, info, array, dtype=False)
            targets.append((info, item.arrays))
        return targets, None

    def pushpull_arguments(self, key: Keys, value: Values, out: Values) -> tuple[list[Item], Targets]:
        """What to push, and where to write the results."""
        items = self.items("pushpull", key, value)
        if out is None:
            targets = [(self.info("pushpull", item.key), item.arrays) for item in items]
            for info, arrays in targets:
                for array in arrays:
                    check_writable(array, f"pushpull: the value of key {shown(info.key)}, with out=None")
        else:
            targets = self.outs("pushpull", key, out)[0]
        if {item.key for item in items} != {info.key for info, _ in targets}:
            raise ValueError("pushpull: `out` is for other keys than `value`")
        return items, targets

    def prepare(self, items: list[Item], targets: Targets) -> PreparedCall | None:
        """A shorter way for these arguments. Raises what is wrong with them."""
        outs = {info.key: arrays for info, arrays in targets}
        arrays = [array for item in items for array in (*item.arrays, *outs[item.key])]
        if not items or any(len(item.arrays) != 1 for item in items) or any(is_device(array) for array in arrays):
            return None
        infos = [self.info("pushpull", item.key) for item in items]
        for info, item in zip(infos, items, strict=True):
            self.check_value("pushpull", info, item.arrays[0], dtype=True)
        return self._strategy.prepare(
            infos,
            [host_view(item.arrays[0], "pushpull") for item in items],
            [[host_view(array, "pushpull") for array in outs[item.key]] for item in items],
        )
