"""The reference store: what a store means, in one process, by plain loops.

It holds every round of every key explicitly and knows nothing of shards, owners or messages. A round is complete when
every worker has pushed it; its sum is taken in the order of the workers, float16 and bfloat16 in float32. An
asynchronous store applies every push when it is made. Slow on purpose: tests compare the real stores with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Update = Callable[[Array, Array], Array]


def add(arrays: Sequence[Array]) -> Array:
    """Return the sum of arrays of one shape and dtype, in the order given, rounded once to their dtype.

    >>> from mpikv.testing.reference import add
    >>> add([np.ones(2), np.ones(2)])
    array([2., 2.])
    """
    dtype = arrays[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype  # both two-byte dtypes are floating point
    total = np.zeros(arrays[0].shape, wide)
    for array in arrays:
        total = np.asarray(total + array.astype(wide), dtype=wide)
    return np.asarray(total.astype(dtype))


class ReferenceStore:
    """All workers of one store in one object; each call says which worker makes it.

    >>> from mpikv.testing.reference import ReferenceStore
    >>> store = ReferenceStore(2)
    >>> store.init('w', np.zeros(2))
    >>> for worker in range(2):
    ...     store.push(worker, 'w', [np.ones(2)])
    >>> store.pull(0, 'w')
    array([2., 2.])
    """

    def __init__(self, num_workers: int, *, synchronous: bool = True, update: Update | None = None) -> None:
        """update(weight, total) -> new weight; None: the stored value becomes the sum."""
        self.num_workers = num_workers
        self._synchronous = synchronous
        self._update = update
        self._versions: dict[object, list[Array]] = {}
        self._rounds: dict[object, list[dict[int, Array]]] = {}
        self._pushed: dict[tuple[object, int], int] = {}

    def init(self, key: object, value: Array) -> None:
        """Give a key its first value: worker 0's. KeyError for a key that is there already."""
        if key in self._versions:
            raise KeyError(key)
        self._versions[key] = [np.array(value)]
        self._rounds[key] = []

    def push(self, worker: int, key: object, devices: Sequence[Array]) -> None:
        """Push the arrays of this worker's devices once."""
        rounds, mine = self._rounds[key], self._pushed.get((key, worker), 0)
        self._pushed[key, worker] = mine + 1
        if not self._synchronous:
            self._apply(key, add(devices))
            return
        if mine == len(rounds):
            rounds.append({})
        rounds[mine][worker] = add(devices)
        if len(rounds[mine]) == self.num_workers:
            self._apply(key, add([rounds[mine][i] for i in range(self.num_workers)]))

    def _apply(self, key: object, total: Array) -> None:
        weight = self._versions[key][-1]
        self._versions[key].append(total if self._update is None else self._update(weight, total))

    def pull(self, worker: int, key: object) -> Array:
        """Return what the worker's pull returns. LookupError where a real store would wait for other workers."""
        versions = self._versions[key]
        wanted = self._pushed.get((key, worker), 0) if self._synchronous else len(versions) - 1
        if wanted >= len(versions):
            raise LookupError(f"round {wanted} of key {key!r} is not complete")
        return np.array(versions[wanted])
