"""Keys of gradients that are freed, and their memory, for the next gradients of the same sizes.

A store forgets no key. So a model that is wrapped later takes the keys of one that all workers have dropped, if no
tensor refers to the memory any more. Keys with a codec, whose states belong to what was sent, are not taken again.

Cost: one small exchange when keys are made, if there were others before.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np

from mpikv.calls.keyless import CollectiveCalls
from mpikv.kvstore import KVStore
from mpikv.strategies.base import PreparedCall


class Spare(NamedTuple):
    """Some keys and their memory. in_use: dead where no tensor refers to it. calls: prepared with them and others."""

    sizes: str
    keys: list[str]
    flats: list[Any]
    in_use: list[weakref.ref[Any] | None]
    calls: list[PreparedCall]


class Spares:
    """Those of one store, in the order in which keys were made, which is the same on all workers."""

    def __init__(self) -> None:
        self._all: list[Spare | None] = []

    @classmethod
    def of(cls, store: KVStore) -> Spares:
        found: Spares = vars(store).setdefault("_torch_spares", cls())
        return found

    def take(self, calls: CollectiveCalls, sizes: str) -> tuple[int, Spare | None]:
        """Return spare keys of these sizes, None if there are none, and a number for `give`. Collective, blocks."""
        free = [
            one is not None and one.sizes == sizes and all(ref is None or ref() is None for ref in one.in_use)
            for one in self._all
        ]
        if free:
            (agreed,) = calls.allreduce([np.array(free, np.uint8)], "min", "spare keys")
            for i in np.flatnonzero(agreed).tolist():
                spare, self._all[i] = self._all[i], None
                return i, spare
        self._all.append(None)
        return len(self._all) - 1, None

    def give(self, i: int, spare: Spare) -> None:
        """Give keys back. Any thread may do so, at any time, as the garbage collector does."""
        self._all[i] = spare
