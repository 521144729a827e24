"""Calls that come again and again with the same arrays, as a training loop's do: checked once, then known.

A call is known by its keys and by the very array objects it was made with, in order. It is kept from its second coming
on, so that arrays that are new in every step are not held: one call per single key, and a few with lists of keys.
What is not looked at again, for it would cost as much as the call: whether an array in a list was given another shape
in place, or made read-only, since it was pushed last.

Cost of finding a call: a comparison of identity per key.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import is_
from typing import Any

from mpikv.strategies.base import PreparedCall

KEPT_LISTS = 16  # more than a program has trainers, or parts of a model that it pushes in turn
KEPT_SINGLES = 4096

Listed = (list, tuple)


class _Single:
    """A known call with one key, and one array each for value and result."""

    __slots__ = ("call", "out", "shape", "value")

    def __init__(self, value: Any, out: Any, call: PreparedCall) -> None:
        self.value = value
        self.out = out
        self.shape = value.shape
        self.call = call


class _List:
    """A known call with lists."""

    __slots__ = ("call", "keys", "nested", "outs", "texts", "types", "unequal", "values")

    def __init__(self, keys: Any, value: Any, out: Any, call: PreparedCall) -> None:
        self.keys = list(keys)
        self.types = [*map(type, keys)]
        self.nested = any(isinstance(one, Listed) for one in (*value, *(out or ())))
        self.values = _objects(value) if self.nested else list(value)
        self.outs = None if out is None else _objects(out) if self.nested else list(out)
        self.texts = all(type(one) is str for one in keys)
        self.unequal = not self.nested and all(one.size > 1 for one in value)
        self.call = call

    def is_same(self, keys: Any, value: Any, out: Any) -> bool:
        """Whether a call is this one."""
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
    """The arrays of a list of arrays or of lists of them, with the length of each inner list, for its form counts."""
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
        self._seen: OrderedDict[Any, tuple[int, ...]] = OrderedDict()

    def find(self, key: Any, value: Any, out: Any) -> PreparedCall | None:
        """The call that was made with these very arguments before."""
        if type(key) is str or type(key) is int:
            known = self._singles.get(key)
            if (
                known is not None
                and known.value is value
                and known.out is out
                and value.shape == known.shape
                and (value if out is None else out).flags.writeable
                and known.call.valid
            ):
                return known.call
        elif type(key) in Listed and type(value) in Listed and (out is None or type(out) in Listed):
            for i, listed in enumerate(self._lists):
                if listed.is_same(key, value, out) and listed.call.valid:
                    if i:
                        self._lists.insert(0, self._lists.pop(i))
                    return listed.call
        return None

    def add(self, key: Any, value: Any, out: Any, call: PreparedCall) -> None:
        """Keep a call if it comes for the second time, else let go of it."""
        listed = isinstance(key, Listed)
        if not listed and (isinstance(value, Listed) or isinstance(out, Listed)):
            call.release()  # one key with lists of one array each: seldom, and not worth a form of its own
            return
        name = ("list", *key) if listed else key
        ids = tuple(map(id, [*_objects(value), None, *_objects(out or ())] if listed else [value, out]))
        if self._seen.get(name) != ids:
            self._seen[name] = ids
            if len(self._seen) > KEPT_SINGLES:
                self._seen.popitem(last=False)
            call.release()
            return
        if listed:
            kept = [old for old in self._lists if old.call.valid][: KEPT_LISTS - 1]
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
        """Let go of everything."""
        for call in [*(known.call for known in self._singles.values()), *(known.call for known in self._lists)]:
            call.release()
        self._singles.clear()
        self._lists.clear()
        self._seen.clear()
