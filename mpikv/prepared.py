"""Calls that come again and again with the same arrays, as a training loop's do: checked once, then known.

A call is known by its keys and by the very array objects it was made with, in order. It is kept from its second coming
on, so that arrays that are new in every step are not held: one call per single key, and a few with lists of keys.

Cost of finding a call: a comparison of identity per key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import is_
from typing import Any

from mpikv.strategies.base import PreparedCall

KEPT_LISTS = 16  # more than a program has trainers, or parts of a model that it pushes in turn
KEPT_SINGLES = 4096


class _Known:
    __slots__ = ("call", "keys", "nested", "objects", "out", "value")

    def __init__(self, keys: Any, value: Any, out: Any, call: PreparedCall) -> None:
        self.keys = list(keys) if isinstance(keys, (list, tuple)) else keys
        self.value = value
        self.out = out
        listed = isinstance(keys, (list, tuple))
        self.objects = _objects(value, out) if listed else []
        self.nested = listed and any(isinstance(one, (list, tuple)) for one in (*value, *(out or ())))
        self.call = call

    def is_same(self, keys: Any, value: Any, out: Any) -> bool:
        """Whether a call with lists is this one."""
        if len(keys) != len(self.keys) or (keys if type(keys) is list else list(keys)) != self.keys:
            return False
        if self.nested:
            objects = _objects(value, out)
        elif out is None:
            objects = value
        else:
            objects = [*value, *out]
        return len(objects) == len(self.objects) and all(map(is_, objects, self.objects))


def _objects(value: Any, out: Any) -> list[Any]:
    """The arrays of lists of arrays or of lists of them, with the length of each inner list, for its form counts."""
    found: list[Any] = []
    for one in value if out is None else [*value, None, *out]:
        if isinstance(one, (list, tuple)):
            found.append(len(one))
            found += one
        elif one is not None:
            found.append(one)
    return found


class PreparedCalls:
    """The prepared calls of one store."""

    def __init__(self) -> None:
        self._singles: OrderedDict[Any, _Known] = OrderedDict()
        self._lists: list[_Known] = []  # the last used first
        self._seen: OrderedDict[Any, tuple[int, ...]] = OrderedDict()

    def find(self, key: Any, value: Any, out: Any) -> PreparedCall | None:
        """The call that was made with these very arguments before."""
        if type(key) is str or type(key) is int:
            known = self._singles.get(key)
            if known is not None and known.value is value and known.out is out and known.call.valid:
                return known.call
        elif type(key) in (list, tuple) and type(value) in (list, tuple) and (out is None or type(out) in (list, tuple)):
            for i, known in enumerate(self._lists):
                if known.is_same(key, value, out) and known.call.valid:
                    if i:
                        self._lists.insert(0, self._lists.pop(i))
                    return known.call
        return None

    def add(self, key: Any, value: Any, out: Any, call: PreparedCall) -> None:
        """Keep a call if it comes for the second time, else let go of it."""
        name, ids = _name(key), _ids(value, out)
        if self._seen.get(name) != ids:
            self._seen[name] = ids
            if len(self._seen) > KEPT_SINGLES:
                self._seen.popitem(last=False)
            call.release()
            return
        known = _Known(key, value, out, call)
        if isinstance(key, (list, tuple)):
            self._lists.insert(0, known)
            dropped = [old for old in self._lists[1:] if not old.call.valid] + self._lists[KEPT_LISTS:]
            self._lists = [old for old in self._lists if old not in dropped]
        else:
            dropped = [self._singles.pop(key)] if key in self._singles else []
            self._singles[key] = known
            if len(self._singles) > KEPT_SINGLES:
                dropped.append(self._singles.popitem(last=False)[1])
        for old in dropped:
            old.call.release()

    def clear(self) -> None:
        """Let go of everything."""
        for known in (*self._singles.values(), *self._lists):
            known.call.release()
        self._singles.clear()
        self._lists.clear()
        self._seen.clear()


def _name(key: Any) -> Any:
    return ("list", *key) if isinstance(key, (list, tuple)) else key


def _ids(value: Any, out: Any) -> tuple[int, ...]:
    def listed(argument: Any) -> Sequence[Any]:
        return argument if isinstance(argument, (list, tuple)) else [argument]

    return tuple(map(id, _objects(listed(value), None if out is None else listed(out))))
