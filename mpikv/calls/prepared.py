"""Calls that come again and again with the same arrays, as a training loop's do: they are checked once, then known.

A call is known by its keys and by the very array objects it was made with, in order. It is kept from its second coming
on, so that arrays that are new in every step are not held: one call per single key, and a few with lists of keys. Those
of adapters, such as the buckets of a model, are kept at once, so that no value is copied to its key's own place. So it
is not noticed if a NumPy array in a list has been given another shape in place, or was made read-only, since it was
pushed last. PyTorch's tensors are looked at each time, since `tensor.data =` and `set_` give them other memory.

Cost of finding a call: a comparison of identity per key; half a microsecond more for each tensor of PyTorch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays import tensors
from mpikv.arrays.as_numpy import host_view, is_elsewhere
from mpikv.strategies.base import PreparedCall

KEPT_LISTS = 16  # more than a program has trainers, or groups of layers that it pushes in turn
KEPT_SINGLES = 4096

Listed = (list, tuple)


class _Tensor(NamedTuple):
    """A tensor of PyTorch, and where its values were when the call was prepared."""

    tensor: Any
    address: int
    shape: Any
    strides: Any
    dtype: Any

    def is_same(self) -> bool:
        tensor = self.tensor
        return bool(
            tensor.data_ptr() == self.address
            and tensor.shape == self.shape
            and tensor.stride() == self.strides
            and tensor.dtype is self.dtype
        )


def _tensors(arrays: Iterable[Any]) -> list[_Tensor]:
    return [
        _Tensor(array, array.data_ptr(), array.shape, array.stride(), array.dtype)
        for array in arrays
        if tensors.is_tensor(array)
    ]


def may_come_again(array: Any) -> bool:
    """Return whether a prepared call with this array can be known again, and then uses the array's own memory."""
    if isinstance(array, np.ndarray):
        return True
    if not tensors.is_tensor(array) or is_elsewhere(array):
        return False  # JAX's never change; and of those on a GPU each call has to see how far their stream is
    address: int = host_view(array, "a tensor").__array_interface__["data"][0]
    return bool(address == array.data_ptr())  # not so where PyTorch has to make the values first


class _Single:
    """A known call with one key, and one array each for value and result."""

    __slots__ = ("call", "out", "shape", "tensors", "value")

    def __init__(self, value: Any, out: Any, call: PreparedCall) -> None:
        self.value = value
        self.out = out
        self.shape = value.shape
        self.tensors = _tensors((value, out))
        self.call = call

    def is_same(self, value: Any, out: Any) -> bool:
        if value is not self.value or out is not self.out or value.shape != self.shape:
            return False
        target = value if out is None else out
        if isinstance(target, np.ndarray) and not target.flags.writeable:
            return False
        return not self.tensors or all(one.is_same() for one in self.tensors)


class _List:
    """A known call with lists of keys and arrays."""

    __slots__ = ("call", "keys", "nested", "outs", "tensors", "texts", "types", "unequal", "values")

    def __init__(self, keys: Any, value: Any, out: Any, call: PreparedCall) -> None:
        self.keys = list(keys)
        self.types = [*map(type, keys)]
        self.nested = any(isinstance(one, Listed) for one in (*value, *(out or ())))
        self.values = _objects(value) if self.nested else list(value)
        self.outs = None if out is None else _objects(out) if self.nested else list(out)
        self.texts = all(type(one) is str for one in keys)
        self.unequal = not self.nested and all(isinstance(one, np.ndarray) and one.size > 1 for one in value)
        self.tensors = _tensors((*self.values, *(self.outs or ())))
        self.call = call

    def is_same(self, keys: Any, value: Any, out: Any) -> bool:
        return self._is_made_with(keys, value, out) and (not self.tensors or all(one.is_same() for one in self.tensors))

    def _is_made_with(self, keys: Any, value: Any, out: Any) -> bool:
        if len(keys) != len(self.keys):
            return False
        if self.texts and type(keys) is list:
            # Lists compare identical objects without looking at them, a tenth of the cost of `is` for each.
            try:
                return keys == self.keys and self._has_arrays(value, out)
            except Exception:  # noqa: BLE001 - an array among the keys, or an object with an `__eq__` of its own
                return False
        # The same key objects, or at least equal ones of the same type: 1 == True, which is no key.
        if not all(map(is_, keys, self.keys)) and ([*map(type, keys)] != self.types or list(keys) != self.keys):
            return False
        return self._has_arrays(value, out)

    def _has_arrays(self, value: Any, out: Any) -> bool:
        if self.unequal and out is None and self.outs is None and type(value) is list:
            # As for keys; and for two arrays of several elements NumPy has no answer, so they are not the same.
            if not value or value[0] is not self.values[0]:
                return not value and not self.values
            try:
                return bool(value == self.values)
            except Exception:  # noqa: BLE001 - as above
                return False
        if self.nested:
            value, out = _objects(value), None if out is None else _objects(out)
        if len(value) != len(self.values) or not all(map(is_, value, self.values)):
            return False
        if out is None or self.outs is None:
            return out is self.outs
        return len(out) == len(self.outs) and all(map(is_, out, self.outs))


def _objects(argument: Any) -> list[Any]:
    """Return the arrays in a list of arrays or of lists of them, and each inner list's length: the form counts."""
    found: list[Any] = []
    for one in argument:
        if isinstance(one, Listed):
            found.append(len(one))
            found += one
        else:
            found.append(one)
    return found


class PreparedCalls:
    """The prepared calls of one store."""

    def __init__(self) -> None:
        self._singles: OrderedDict[Any, _Single] = OrderedDict()
        self._lists: list[_List] = []  # the last used first
        self._seen: OrderedDict[Any, int] = OrderedDict()

    def find(self, key: Any, value: Any, out: Any) -> PreparedCall | None:
        """Return the call that was made with these very arguments before, or None."""
        if type(key) is str or type(key) is int:
            known = self._singles.get(key)
            if known is not None and known.is_same(value, out) and known.call.valid:
                return known.call
        elif type(key) in Listed and type(value) in Listed and (out is None or type(out) in Listed):
            for i, listed in enumerate(self._lists):
                if listed.is_same(key, value, out) and listed.call.valid:
                    if i:
                        self._lists.insert(0, self._lists.pop(i))
                    return listed.call
        return None

    def add(self, key: Any, value: Any, out: Any, call: PreparedCall, *, at_once: bool = False) -> None:
        """Keep a call if it comes for the second time, else let go of it.

        at_once: keep it the first time, in place of one with the same keys and other arrays.
        """
        listed = isinstance(key, Listed)
        if not listed and (isinstance(value, Listed) or isinstance(out, Listed)):
            call.release()  # one key with lists of one array each: seldom, and not worth a form of its own
            return
        # Hashes of lists, which may be long. Where two are equal by chance, a call is kept one coming too early.
        name = hash(("list", *key)) if listed else key
        ids = hash(tuple(map(id, [*_objects(value), None, *_objects(out or ())] if listed else [value, out])))
        if self._seen.get(name) != ids and not at_once:
            self._seen[name] = ids
            if len(self._seen) > KEPT_SINGLES:
                self._seen.popitem(last=False)
            call.release()
            return
        if listed:
            kept = [old for old in self._lists if old.call.valid and not (at_once and old.keys == list(key))]
            del kept[KEPT_LISTS - 1 :]
            dropped = [old.call for old in self._lists if old not in kept]
            self._lists = [_List(key, value, out, call), *kept]
        else:
            dropped = [self._singles.pop(key).call] if key in self._singles else []
            self._singles[key] = _Single(value, out, call)
            if len(self._singles) > KEPT_SINGLES:
                dropped.append(self._singles.popitem(last=False)[1].call)
        for old_call in dropped:
            old_call.release()

    def clear(self) -> None:
        for call in [*(known.call for known in self._singles.values()), *(known.call for known in self._lists)]:
            call.release()
        self._singles.clear()
        self._lists.clear()
        self._seen.clear()
