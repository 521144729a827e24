"""The host's part of a JAX exchange: NumPy arrays in, NumPy arrays out. This module knows no JAX.

There is one `Calls` for a store. Each kind of sum (op, shapes, dtypes) has keys of its own, one for each dtype, whose
values lie in memory that the workers of a host share: a leaf is copied there once, and added where it is. Other calls,
and sums of further kinds when there are many, go through `CollectiveCalls`, which also compares what the workers bring.

Arrays on the store's GPU have keys of their own there, and are handed to the store as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.calls.keyless import CollectiveCalls
from mpikv.errors import ShapeMismatch
from mpikv.kvstore import KVStore

KINDS = 64  # a program has few; each holds memory as large as its values until the store is closed
ALIGNED = 64  # bytes; XLA uses such memory without another copy


class _Sums:
    """The keys and buffers for one kind of sum. Made by all workers at the same call."""

    def __init__(self, store: KVStore, name: str, arrays: Sequence[HostArray]) -> None:
        self._store = store
        self._keys: list[str] = []
        self._buffers: list[HostArray] = []
        self._parts: list[Any] = [None] * len(arrays)
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            chosen = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            step = ALIGNED // dtype.itemsize
            sizes = [-(-arrays[i].size // step) * step for i in chosen]
            buffer = store.zeros(sum(sizes), dtype)
            self._keys.append(f"{name}/{dtype}")
            self._buffers.append(buffer)
            store.session.compressions.exempt(self._keys[-1])  # calls of one kind are of any arrays
            store.session.own_keys.add(self._keys[-1])
            store.init(self._keys[-1], buffer)
            for i, end, size in zip(chosen, np.cumsum(sizes), sizes, strict=True):
                self._parts[i] = buffer[end - size :][: arrays[i].size].reshape(arrays[i].shape)

    def run(self, arrays: Sequence[HostArray], op: str) -> list[HostArray]:
        """Return the sums or means of arrays, in memory that the next call uses again."""
        divisor = divisor_of(op, self._store)
        for part, array in zip(self._parts, arrays, strict=True):
            if divisor == 1:
                np.copyto(part, array)
            else:  # before adding: no pass of its own, and the sum of float16 does not leave its range
                np.divide(array, divisor, out=part, casting="same_kind")
        self._store.pushpull(self._keys, self._buffers)
        for key, buffer in zip(self._keys, self._buffers, strict=True):
            if (factor := correction(op, self._store, key)) != 1:
                np.multiply(buffer, factor, out=buffer, casting="same_kind")
        return list(self._parts)


class Calls:
    """The calls of one store."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._calls = CollectiveCalls(store)
        self._sums: dict[Any, _Sums] = {}
        self._on_gpu: dict[Any, list[str]] = {}  # the keys of each kind of sum there

    def sums_on_gpu(self, call: Call, arrays: Sequence[Any]) -> Sequence[Any] | None:
        """Return the sums of arrays on the store's GPU, as new arrays there. Collective, blocks.

        arrays: for a mean divided by `divisor_of`. Those that can be written to get the sums themselves. None, on all
        workers, where there are too many kinds of calls already: then the values come to the host.
        """
        self._calls.agree([*call.lines, "on a GPU"], "a call of mpikv.jax", ShapeMismatch)
        kind = call.op, tuple((tuple(array.shape), str(array.dtype)) for array in arrays)
        if kind not in self._on_gpu:
            if len(self._on_gpu) >= KINDS:
                return None
            keys = [f"mpikv.jax/gpu {len(self._on_gpu)}/{i}" for i in range(len(arrays))]
            self.store.session.compressions.exempt(*keys)
            self.store.init(keys, list(arrays))
            self._on_gpu[kind] = keys
        results: Sequence[Any] | None = self.store.pushpull(self._on_gpu[kind], list(arrays))
        factors = [correction(call.op, self.store, key) for key in self._on_gpu[kind]]
        found = arrays if results is None else results
        return [one if factor == 1 else one * factor for one, factor in zip(found, factors, strict=True)]

    def exchange(self, call: Call, arrays: Sequence[HostArray]) -> list[HostArray]:
        """Return the results, in memory that the next call may use again. Collective, blocks."""
        self._calls.agree(call.lines, "a call of mpikv.jax", ShapeMismatch)
        if call.op == "broadcast":
            return self._calls.broadcast(arrays, call.root)
        kind = call.op, tuple((array.shape, array.dtype) for array in arrays)
        if kind not in self._sums:
            if len(self._sums) >= KINDS:
                return self._calls.whole(lambda: self._calls.allreduce(self._divided(arrays, call.op)))
            self._sums[kind] = _Sums(self.store, f"mpikv.jax/{len(self._sums)}", arrays)
        return self._sums[kind].run(arrays, call.op)

    def _divided(self, arrays: Sequence[HostArray], op: str) -> Sequence[HostArray]:
        n = self.store.num_workers if op == "mean" else 1
        return [np.divide(array, n, dtype=array.dtype) for array in arrays] if n > 1 else arrays


def divisor_of(op: str, store: KVStore) -> int:
    """By what values are divided before they are added: the workers that there were at the start. Local."""
    return store.session.at_start if op == "mean" else 1


def correction(op: str, store: KVStore, key: str) -> float:
    """What makes a mean, over those that are in it, of the last sum of a key, where workers have died. Local."""
    n_there = len(store.strategy.contributors(key))
    return store.session.at_start / n_there if op == "mean" and n_there else 1.0


@dataclass(frozen=True)
class Call:
    """One exchange as the program says it. op: mean, sum or broadcast. lines: what every worker must bring alike."""

    calls: Calls
    op: str
    root: int
    lines: tuple[str, ...]
