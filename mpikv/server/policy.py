"""When a server applies what was pushed: the difference between synchronous and asynchronous.

A policy belongs to one shard. `push` takes one worker's gradient and returns what is now to be applied, in order.
`counts` says whether pulls name a version to wait for.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from mpikv.arrays import HostArray
from mpikv.optimizers.owner import AS_SET, AttributesId


class Update(NamedTuple):
    """A sum to apply, in the dtype that the key is added in, and the number of the attributes to apply it with."""

    total: HostArray
    attributes: AttributesId


class Policy(Protocol):
    """Decides, for one shard, what is applied when."""

    counts: bool

    def push(self, worker: int, gradient: HostArray, attributes: AttributesId) -> list[Update]:
        """One worker's gradient, which becomes the policy's own (1-D, in the dtype of the sum)."""
        ...


class _Round:
    """One round under way: the sum of the first workers, and what later ones have brought ahead of their turn."""

    def __init__(self) -> None:
        self.total: HostArray | None = None
        self.next_worker = 0
        self.early: dict[int, HostArray] = {}
        self.attributes: AttributesId = AS_SET


class Synchronous:
    """Applies a round when every worker has pushed it, adding in the order of the workers.

    The i-th push of a worker belongs to round i, so a fast worker cannot stand in for a slow one. Contributions are
    added as soon as all workers before have come: at most W-1 wait, usually few.
    """

    counts = True

    def __init__(self, num_workers: int, version: int) -> None:
        self._num_workers = num_workers
        self._pushed = [version] * num_workers
        self._rounds: dict[int, _Round] = {}

    def push(self, worker: int, gradient: HostArray, attributes: AttributesId) -> list[Update]:
        """Add to the worker's round; rounds complete in order, at most one by one push."""
        self._pushed[worker] += 1
        number = self._pushed[worker]
        current = self._rounds.setdefault(number, _Round())
        current.early[worker] = gradient
        if worker == 0:
            # Attributes may differ between workers only by mistake; worker 0's hold, so that the result is fixed.
            current.attributes = attributes
        while current.next_worker in current.early:
            part = current.early.pop(current.next_worker)
            if current.total is None:
                current.total = part
            else:
                np.add(current.total, part, out=current.total)
            current.next_worker += 1
        if current.next_worker < self._num_workers or current.total is None:
            return []
        del self._rounds[number]
        return [Update(current.total, current.attributes)]


class Asynchronous:
    """Applies every push at once."""

    counts = False

    def __init__(self, num_workers: int, version: int) -> None:
        """Needs neither."""

    def push(self, worker: int, gradient: HostArray, attributes: AttributesId) -> list[Update]:
        """The gradient itself."""
        return [Update(gradient, attributes)]
