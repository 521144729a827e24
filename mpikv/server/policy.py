"""Policies: when a server applies pushed gradients. They are the difference between synchronous and asynchronous.

A policy belongs to one unit: the elements of a key that are updated at one time (shard.py). `push` takes one worker's
gradient and returns what is to be applied now, if anything. `counts`: whether pulls and pushes belong to rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.optimizers.owner import AttributesId


class RoundUpdate(NamedTuple):
    """A gradient to apply, and the number of the attributes to apply it with.

    terms: one array, or two of which the last addition is left to the code that applies the sum: an optimizer adds
    block by block, and uses each block while it is in the cache. op: the reduction in place of the sum. pushed: each
    worker's attributes and reduction, where these must be equal.
    """

    terms: Sequence[HostArray]
    attributes: AttributesId
    op: Reduction = SUM
    pushed: Sequence[tuple[AttributesId, Reduction]] = ()


class Contribution(NamedTuple):
    """One worker's gradient (1-D, in the dtype of the sum)."""

    gradient: HostArray
    attributes: AttributesId
    op: Reduction = SUM


class Memory(Protocol):
    """The pool of the gradients' memory (memory.Pool)."""

    def combine(self, total: HostArray, other: HostArray, how: np.ufunc) -> HostArray: ...


class Policy(Protocol):
    """Decides for one unit when gradients are applied."""

    counts: bool

    def push(self, worker: int, contribution: Contribution, memory: Memory) -> RoundUpdate | None:
        """Take one worker's contribution, which the policy owns from now on. What is to be applied now."""


class Synchronous:
    """Applies a round when every worker has pushed it, adding in the order of the workers.

    It gets only gradients of the round under way, one per worker: at most W-1 wait for those before, usually few.
    """

    counts = True

    def __init__(self, num_workers: int) -> None:
        self._num_workers, self._next_worker = num_workers, 0
        self._total: HostArray | None = None
        self._early: dict[int, Contribution] = {}
        self._pushed: list[tuple[AttributesId, Reduction]] = []  # of the gradients that have been added

    def push(self, worker: int, contribution: Contribution, memory: Memory) -> RoundUpdate | None:
        if worker != self._next_worker:
            self._early[worker] = contribution
            return None
        found: Contribution | None = contribution
        while found is not None:
            gradient = found.gradient
            self._pushed.append((found.attributes, found.op))
            attributes, op = self._pushed[0]
            self._next_worker += 1
            if self._next_worker == self._num_workers:
                terms = (gradient,) if self._total is None else (self._total, gradient)
                update = RoundUpdate(terms, attributes, op, self._pushed)
                self._next_worker, self._total, self._pushed = 0, None, []
                return update
            self._total = gradient if self._total is None else memory.combine(self._total, gradient, op.combine)
            found = self._early.pop(self._next_worker, None)
        return None


class Asynchronous:
    """Applies every push at once."""

    counts = False

    def __init__(self, num_workers: int) -> None:
        """As `Synchronous`, which a key's shard makes in the same way."""

    def push(self, worker: int, contribution: Contribution, memory: Memory) -> RoundUpdate | None:
        return RoundUpdate((contribution.gradient,), contribution.attributes)
