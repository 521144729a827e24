"""A store whose caller has all arrays on a fake GPU, for tests that are written for arrays of NumPy.

What a call is given is put on the GPU, and what the call has written there is brought back, into the NumPy array that
stands for it. So a test of the store runs on device memory as it is, and compares the same values.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
from foreign_arrays import ForeignArray

from mpikv.arrays.as_numpy import SUPPORTED_DTYPES

CALLS = ("init", "push", "broadcast", "pull", "pushpull", "push_async", "pull_async", "pushpull_async")


class DeviceStore:
    def __init__(self, store: Any, cupy: Any) -> None:
        self._store, self._cupy = store, cupy
        self._under_way: list[_Moved] = []

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name) if name in CALLS else getattr(self._store, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._store.__reduce_ex__(protocol)

    def __contains__(self, key: Any) -> bool:
        return key in self._store

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        call, moved = getattr(self._store, name), _Moved(self._cupy)
        try:
            bound = inspect.signature(call).bind(*args, **named)
        except TypeError:
            return call(*args, **named)  # which raises it
        given = bound.arguments
        if "value" in given:
            in_place = name.startswith("pushpull") and given.get("out") is None
            given["value"] = (moved.out if in_place else moved.up)(given["value"])
        if given.get("out") is not None:
            given["out"] = moved.out(given["out"])
        found = call(*bound.args, **bound.kwargs)
        if not name.endswith("_async") or name == "push_async":
            return moved.result(found)
        self._under_way.append(moved)
        return _Request(found, moved)

    def wait_all(self, *args: Any, **named: Any) -> None:
        self._store.wait_all(*args, **named)
        for moved in self._under_way:
            moved.down()
        self._under_way.clear()


class _Request:
    def __init__(self, request: Any, moved: _Moved) -> None:
        self._request, self._moved = request, moved

    def test(self) -> bool:
        done: bool = self._request.test()
        if done:
            self._moved.down()
        return done

    def wait(self, *args: Any, **named: Any) -> Any:
        return self._moved.result(self._request.wait(*args, **named))


class _Moved:
    """The arrays of one call: one on the GPU for each of NumPy's, also where that comes twice."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._pairs: dict[int, tuple[Any, Any]] = {}
        self._outs: dict[int, tuple[Any, Any]] = {}

    def up(self, value: Any) -> Any:
        """The same with arrays on the GPU; what a store takes from nowhere else stays."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.up(one) for one in value)
        if isinstance(value, dict):
            return {key: self.up(one) for key, one in value.items()}
        memory = value.memory if type(value) is ForeignArray else value  # of the simpler device, which no GPU knows
        if type(memory) is not np.ndarray or memory.dtype not in SUPPORTED_DTYPES:
            return value
        return self._pairs.setdefault(id(value), (value, self._cupy.array(memory)))[1]

    def out(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self.out(one) for one in value)
        if type(value) not in (np.ndarray, ForeignArray) or not value.flags.writeable:
            return value
        made = self.up(value)
        if made is not value:
            self._outs[id(value)] = value, made
        return made

    def down(self) -> None:
        for value, made in self._outs.values():
            memory = value.memory if type(value) is ForeignArray else value
            memory[...] = made.get().reshape(memory.shape)
        self._outs.clear()

    def result(self, found: Any) -> Any:
        """What the call returned, with NumPy's arrays for those of the GPU."""
        self.down()
        return self._back(found, {id(made): value for value, made in self._pairs.values()})

    def _back(self, found: Any, back: dict[int, Any]) -> Any:
        if isinstance(found, (list, tuple)):
            return type(found)(self._back(one, back) for one in found)
        return back.get(id(found), found)
