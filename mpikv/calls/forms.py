"""The forms of a call: one key or a list, one array or one per device, a key repeated in a list.

Each becomes a list of items, one per key, in the order of first appearance; shapes and dtypes are checked, and the
arrays of this worker's devices are added up, so that a strategy sees one flat array per key. Everything of a call is
checked before anything is sent. Local.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import (
    BFLOAT16,
    check_writable,
    host_view,
    is_array,
    is_elsewhere,
    is_writable,
    shape_and_dtype,
)
from mpikv.arrays.reductions import SUM, Reduction, named
from mpikv.arrays.row_sparse import is_sparse
from mpikv.arrays.tensors import adopted, empty_like, new_like
from mpikv.common.checks import shown
from mpikv.errors import KeyNotInitialized, ShapeMismatch, UnsupportedError
from mpikv.placement.keys import Key, KeyInfo, check_key
from mpikv.session.base import Session
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.callers import on_gpu
from mpikv.spaces.named import HOST
from mpikv.strategies.base import Entry, Strategy, flattened

Array = Any  # NumPy, CuPy, or anything with DLPack
Keys = Key | Sequence[Key]
Values = Any  # an array, a list of arrays (one per device), or a list of either (one per key)
Targets = list[tuple[KeyInfo, list[Array]]]


class CallItem(NamedTuple):
    """A key of a call and all arrays that the call has for it."""

    key: Key
    arrays: list[Array]


class New(NamedTuple):
    """A result that is a new array: the memory that it is written to, and an array of the library it is of."""

    memory: Array
    like: Array
    what: str

    def made(self) -> Array:
        on_host = isinstance(self.memory, np.ndarray)
        return new_like(self.memory, self.like, self.what) if on_host else adopted(self.memory, self.like)


_NUMPY: np.ndarray[Any, Any] = np.empty(0)


def finished(form: Any) -> Any:
    """Return what a call returns, which `form` describes: lists as they are, each `New` as its array; None: nothing."""
    if isinstance(form, New):
        return form.made()
    return [finished(one) for one in form] if isinstance(form, list) else form


def _fits(info: KeyInfo, array: Array) -> bool:
    """Whether an array is NumPy's, in the shape and the dtype of a key, as nearly all are."""
    return type(array) is np.ndarray and array.shape == info.shape and array.dtype == info.dtype


class CallForms:
    """Finds out what the arguments of a store's calls mean. on_device: devices are summed on the first of them."""

    def __init__(self, session: Session, strategy: Strategy, *, on_device: bool) -> None:
        self._session, self._strategy = session, strategy
        self._on_device = on_device
        self.key_type: type | None = None  # of all keys of the store, once there are any

    def where(self) -> str:
        return f"worker {self._session.rank} of {self._session.num_workers}"

    def key(self, key: Any) -> Key:
        """Return the key itself. TypeError for what is no key, or one of the other kind than the store's keys."""
        checked = check_key(key)
        if self.key_type is not None and type(checked) is not self.key_type:
            raise TypeError(
                f"key {shown(checked)} is {type(checked).__name__}, but the keys of this store are "
                f"{self.key_type.__name__}; a store does not mix them"
            )
        return checked

    def items(self, call: str, keys: Keys, values: Values) -> list[CallItem]:
        """Return one item per key, in the order of first appearance, with all arrays of that key."""
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
                if not is_array(array) and not is_sparse(array):
                    raise TypeError(
                        f"{call}: the value of key {shown(key)} is {type(array).__name__}, "
                        "not an array (NumPy, CuPy or anything with DLPack) or a RowSparse"
                    )
            found.setdefault(checked, []).extend(arrays)
        return [CallItem(key, arrays) for key, arrays in found.items()]

    def info(self, call: str, key: Key) -> KeyInfo:
        """Return what is known of a key. Raises KeyNotInitialized."""
        info = self._session.lookup(key)
        if info is None:
            known = [entry.key for entry in self._session.in_order()]
            some = ", ".join(shown(entry) for entry in known[:8]) + (", ..." if len(known) > 8 else "")
            raise KeyNotInitialized(
                f"{call}: key {shown(key)} was never initialised ({self.where()}); "
                + (f"the store holds {some}" if known else "the store holds no key")
            )
        return info

    def check_value(self, call: str, info: KeyInfo, array: Array, *, dtype: bool) -> None:
        """Raise ShapeMismatch where an array has another shape than the key, or (dtype=True) another dtype."""
        if _fits(info, array):
            return
        shape, found = shape_and_dtype(array, f"{call}: the value of key {shown(info.key)}")
        if shape != info.shape or (dtype and found != info.dtype):
            raise ShapeMismatch(
                f"{call}: key {shown(info.key)} is {info.dtype} {info.shape}, this array is {found} {shape} "
                f"({self.where()}); nothing was sent"
            )

    def reduction(self, call: str, keys: Keys, op: Any) -> Reduction:
        """Return the reduction that is called `op`. UnsupportedError for keys for which the store cannot do it."""
        found = named(op)
        for key in keys if isinstance(keys, (list, tuple)) else [keys]:
            if found is SUM:
                break
            info = self.info(call, self.key(key))
            why = ""
            if not self._session.synchronous:
                why = "an asynchronous store applies every push by itself"
            elif self._session.updates(info):
                why = "it is updated by an optimizer or an updater, which take sums"
            elif found.is_mean and info.dtype.kind != "f" and info.dtype != BFLOAT16:
                why = f"{info.dtype} holds whole numbers, a mean is none: divide the sum as you want it rounded"
            elif found.whole and info.dtype not in (np.float32, np.float64):
                why = f"it is defined for float32 and float64, and this key is {info.dtype}"
            if why:
                raise UnsupportedError(f"{call}: op={op!r} of key {info.key!r}: {why}")
        return found

    def totals(self, call: str, items: list[CallItem], op: Reduction = SUM) -> list[tuple[KeyInfo, SpaceArray]]:
        """Check everything, and only then sum over devices into new arrays, so that an error leaves no half sent."""
        infos = [self.info(call, item.key) for item in items]
        for info, item in zip(infos, items, strict=True):
            for array in item.arrays:
                self.check_value(call, info, array, dtype=True)
        spaces = self._session.spaces
        callers = iter(spaces.callers_arrays([array for item in items for array in item.arrays]))
        return [
            (
                info,
                spaces.total(
                    info.space,
                    list(islice(callers, len(item.arrays))),
                    f"{call}: the value of key {shown(info.key)}",
                    on_device=self._on_device,
                    combine=op.combine,
                ),
            )
            for info, item in zip(infos, items, strict=True)
        ]

    def placed(
        self, call: str, keys: Keys, values: Values, place: Callable[[KeyInfo, Array], Array | New]
    ) -> tuple[Targets, Any]:
        """Return where the results of each key go, by `place` of each array, and the form of what the call returns."""
        grouped: dict[int, tuple[KeyInfo, list[Array]]] = {}

        def one(key: Any, value: Any) -> Any:
            info = self.info(call, self.key(key))
            found = [place(info, array) for array in (value if isinstance(value, (list, tuple)) else [value])]
            memory = [array.memory if isinstance(array, New) else array for array in found]
            grouped.setdefault(info.id, (info, []))[1].extend(memory)
            return found if isinstance(value, (list, tuple)) else found[0]

        form = list(map(one, keys, values)) if isinstance(keys, (list, tuple)) else one(keys, values)
        return list(grouped.values()), form

    def new(self, call: str, info: KeyInfo, like: Array) -> New:
        what = f"{call}: the result of key {shown(info.key)}"
        space = self._session.spaces.device
        made = None
        if space is not None and on_gpu(like):
            made = empty_like(info.shape, info.dtype, like, lambda number: space.gpu.current(what, number))
        return New(np.empty(info.shape, info.dtype) if made is None else made, like, what)

    def outs(self, call: str, keys: Keys, out: Values, like: Values = None) -> tuple[Targets, Any]:
        """Return the arrays to write into for each key, and where `out` is None the form of what to return."""
        if out is None:
            return self._new_outs(call, keys, like)
        if like is not None:
            raise ValueError(f"{call}: `out` is what results are written to, `like` what new ones are like: give one")
        targets = []
        for item in self.items(call, keys, out):
            info = self.info(call, item.key)
            for array in item.arrays:
                check_writable(array, f"{call}: out of key {shown(item.key)}")
                self.check_value(call, info, array, dtype=False)
            targets.append((info, item.arrays))
        return targets, None

    def _new_outs(self, call: str, keys: Keys, like: Values) -> tuple[Targets, Any]:
        several = isinstance(keys, (list, tuple))
        if like is None:
            like = [_NUMPY] * len(keys) if several else _NUMPY  # type: ignore[arg-type]
        else:
            if is_array(like) and several:
                like = [like] * len(keys)  # type: ignore[arg-type]
            self.items(call, keys, like)

        def place(info: KeyInfo, array: Array) -> New:
            if not isinstance(array, np.ndarray):  # whether there can be such an array, before anything is sent
                New(np.empty(0, info.dtype), array, f"{call}: like of key {shown(info.key)}").made()
            return self.new(call, info, array)

        return self.placed(call, keys, like, place)

    def pushpull_arguments(self, key: Keys, value: Values, out: Values) -> tuple[list[CallItem], Targets, Any]:
        """Return what to push, where to write the results, and the form of what to return."""
        items = self.items("pushpull", key, value)
        if out is not None:
            targets, form = self.outs("pushpull", key, out)
        else:
            made = []

            def place(info: KeyInfo, array: Array) -> Array | New:
                if isinstance(array, np.ndarray) and _fits(info, array) and array.flags.writeable:
                    return array
                if is_writable(array, f"pushpull: the value of key {shown(info.key)}"):
                    return array
                made.append(self.new("pushpull", info, array))
                return made[-1]

            targets, form = self.placed("pushpull", key, value, place)
            if not made:
                form = None
        if {item.key for item in items} != {info.key for info, _ in targets}:
            raise ValueError("pushpull: `out` is for other keys than `value`")
        return items, targets, form

    def lent(self, items: list[CallItem], targets: Targets, *, in_place: bool) -> list[Entry] | None:
        """Return the entries of a call that lends its arrays. None, with nothing done: it has others than one array
        of the host for each key, or arrays that overlap. in_place: whether results must come to what is pushed.
        """
        if not self._strategy.lends:
            return None
        if in_place and not all(
            len(item.arrays) == len(outs) == 1 and item.arrays[0] is outs[0]
            for item, (_, outs) in zip(items, targets, strict=True)
        ):
            return None
        outs = {info.key: arrays for info, arrays in targets}
        arrays = [array for item in items for array in (*item.arrays, *outs[item.key])]
        if {len(item.arrays) for item in items} != {1}:
            return None
        infos = [self.info("pushpull", item.key) for item in items]
        if {info.space for info in infos} != {HOST}:
            return None
        if any(is_elsewhere(array) for array in arrays if type(array) is not np.ndarray):
            return None
        known = {id(array): host_view(array, "pushpull") for array in arrays}
        for info, item in zip(infos, items, strict=True):
            self.check_value("pushpull", info, item.arrays[0], dtype=True)
        values = [known[id(item.arrays[0])] for item in items]
        flat = flattened(infos, values, [[known[id(array)] for array in outs[item.key]] for item in items])
        if flat is None:
            return None
        return [Entry(info, value, None, to) for info, (value, to) in zip(infos, flat, strict=True)]
