"""Policies: when a server applies pushed gradients. They are the difference between synchronous and asynchronous.

A policy belongs to one unit: the elements of a key that are updated at one time (shard.py). `push` takes one worker's
gradient and returns what is to be applied now, if anything. `counts`: whether pulls and pushes belong to rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.optimizers.owner import AttributesId

Cut = Callable[[Sequence[HostArray]], Sequence[HostArray]]


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

    def regrouped(self, others: Sequence[Any], cut: Cut, count: int) -> Sequence[Policy]:
        """The policies of `count` new units, for a key whose units are cut anew.

        This policy and `others` are those of the old units, in order; all have taken the same pushes. cut: joins arrays
        of the old units and cuts them for the new ones.
        """


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

    def regrouped(self, others: Sequence[Synchronous], cut: Cut, count: int) -> Sequence[Policy]:
        everyone = (self, *others)
        totals = [unit._total for unit in everyone if unit._total is not None]  # noqa: SLF001 - of the same class
        new_totals = cut(totals) if totals else [None] * count
        early = {
            worker: [
                contribution._replace(gradient=gradient)
                for gradient in cut([u._early[worker].gradient for u in everyone])  # noqa: SLF001 - of the same class
            ]
            for worker, contribution in self._early.items()
        }
        result = [Synchronous(self._num_workers) for _ in range(count)]
        for i, unit in enumerate(result):
            unit._next_worker, unit._total = self._next_worker, new_totals[i]  # noqa: SLF001 - of the same class
            unit._pushed = list(self._pushed)  # noqa: SLF001 - of the same class
            unit._early = {worker: parts[i] for worker, parts in early.items()}  # noqa: SLF001 - of the same class
        return result


class Asynchronous:
    """Applies every push at once."""

    counts = False

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def push(self, worker: int, contribution: Contribution, memory: Memory) -> RoundUpdate | None:
        return RoundUpdate((contribution.gradient,), contribution.attributes)

    def regrouped(self, others: Sequence[Asynchronous], cut: Cut, count: int) -> Sequence[Policy]:
        return [Asynchronous(self._num_workers) for _ in range(count)]
