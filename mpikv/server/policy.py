"""When a server applies what was pushed: the difference between synchronous and asynchronous.

A policy belongs to one unit, a piece of a key that is updated at one time. `push` takes one worker's gradient and says
what is now to be applied. `counts` says whether pulls and pushes belong to rounds.
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
    """What to apply: one array, or two whose sum it is, and the number of the attributes to apply it with.

    terms: in the dtype that the key is added in. The last addition is left to whoever applies the sum: an optimizer
    adds block by block, and uses the sum while it is in the cache. op: what they become in place of the sum. pushed:
    what each worker has pushed them under, attributes and reduction, where that must be alike.
    """

    terms: Sequence[HostArray]
    attributes: AttributesId
    op: Reduction = SUM
    pushed: Sequence[tuple[AttributesId, Reduction]] = ()


class Contribution(NamedTuple):
    """One worker's gradient (1-D, in the dtype of the sum), and the attributes it is pushed under.

    op: what the gradients of a round become.
    """

    gradient: HostArray
    attributes: AttributesId
    op: Reduction = SUM


class Memory(Protocol):
    """Whose memory gradients are in (memory.Pool)."""

    def combine(self, total: HostArray, other: HostArray, how: np.ufunc) -> HostArray:
        """Combine two arrays as `how` does, and return the result; both arrays are given up."""
        ...


class Policy(Protocol):
    """Decides, for one unit, what is applied when."""

    counts: bool

    def push(self, worker: int, part: Contribution, memory: Memory) -> RoundUpdate | None:
        """Take one worker's contribution, which becomes the policy's own."""
        ...

    def regrouped(self, others: Sequence[Any], cut: Cut, count: int) -> Sequence[Policy]:
        """What this policy and `others`, of all units of a key in order, are for `count` units of another cut.

        All of them have seen the same pushes. cut: joins arrays of the old units and cuts them into the new ones.
        """
        ...


class Synchronous:
    """Applies a round when every worker has pushed it, adding in the order of the workers.

    Only gradients of the round under way come here, one per worker. They are added as soon as all workers before have
    come: at most W-1 wait, usually few.
    """

    counts = True

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._next_worker = 0
        self._total: HostArray | None = None
        self._early: dict[int, Contribution] = {}
        self._pushed: list[tuple[AttributesId, Reduction]] = []  # what those that are added were pushed under

    def push(self, worker: int, part: Contribution, memory: Memory) -> RoundUpdate | None:
        """Add to the round; the last worker's gradient completes it."""
        if worker != self._next_worker:
            self._early[worker] = part
            return None
        found: Contribution | None = part
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
        """The same sums, cut anew."""
        everyone = (self, *others)
        totals = [unit._total for unit in everyone if unit._total is not None]  # noqa: SLF001 - of the same class
        new_totals = cut(totals) if totals else [None] * count
        early = {
            worker: [
                part._replace(gradient=gradient)
                for gradient in cut([u._early[worker].gradient for u in everyone])  # noqa: SLF001 - of the same class
            ]
            for worker, part in self._early.items()
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

    def push(self, worker: int, part: Contribution, memory: Memory) -> RoundUpdate | None:
        """The gradient itself, with its own attributes."""
        return RoundUpdate((part.gradient,), part.attributes)

    def regrouped(self, others: Sequence[Asynchronous], cut: Cut, count: int) -> Sequence[Policy]:
        """Nothing waits here."""
        return [Asynchronous(self._num_workers) for _ in range(count)]
