"""When a server applies what was pushed: the difference between synchronous and asynchronous.

A policy belongs to one unit, a piece of a key that is updated at one time. `push` takes one worker's gradient and says
what is now to be applied. `counts` says whether pulls and pushes belong to rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpikv.arrays import HostArray
from mpikv.errors import ConfigError
from mpikv.optimizers.owner import AS_SET, AttributesId
from mpikv.reductions import SUM, Reduction

Cut = Callable[[Sequence[HostArray]], Sequence[HostArray]]


class Update(NamedTuple):
    """What to apply: one array, or two whose sum it is, and the number of the attributes to apply it with.

    terms: in the dtype that the key is added in. The last addition is left to whoever applies the sum: an optimizer
    adds block by block, and uses the sum while it is in the cache. op: what they become in place of the sum.
    """

    terms: Sequence[HostArray]
    attributes: AttributesId
    op: Reduction = SUM


class Memory(Protocol):
    """Whose memory gradients are in (memory.Pool)."""

    def combine(self, total: HostArray, other: HostArray, how: np.ufunc) -> HostArray:
        """What `how` makes of them; both are given up."""
        ...


class Policy(Protocol):
    """Decides, for one unit, what is applied when."""

    counts: bool

    def push(
        self, worker: int, gradient: HostArray, attributes: AttributesId, memory: Memory, op: Reduction = SUM
    ) -> Update | None:
        """One worker's gradient, which becomes the policy's own (1-D, in the dtype of the sum).

        memory: adds, and takes back what is not needed any more. op: what the gradients of a round become. Raises
        ConfigError where workers give different ones.
        """
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
        self._early: dict[int, HostArray] = {}
        self._attributes: AttributesId = AS_SET
        self._op: tuple[Reduction, int] | None = None  # of this round, and the worker that brought it first

    def push(
        self, worker: int, gradient: HostArray, attributes: AttributesId, memory: Memory, op: Reduction = SUM
    ) -> Update | None:
        """Add to the round; the last worker's gradient completes it."""
        if self._op is None:
            self._op = op, worker
        elif self._op[0] is not op:
            raise ConfigError(f"worker {worker} with op={op.name!r}, worker {self._op[1]} with {self._op[0].name!r}")
        if worker == 0:
            # Attributes may differ between workers only by mistake; worker 0's hold, so that the result is fixed.
            self._attributes = attributes
        if worker != self._next_worker:
            self._early[worker] = gradient
            return None
        part: HostArray | None = gradient
        while part is not None:
            self._next_worker += 1
            if self._next_worker == self._num_workers:
                update = Update((part,) if self._total is None else (self._total, part), self._attributes, op)
                self._next_worker, self._total, self._attributes, self._op = 0, None, AS_SET, None
                return update
            self._total = part if self._total is None else memory.combine(self._total, part, op.combine)
            part = self._early.pop(self._next_worker, None)
        return None

    def regrouped(self, others: Sequence[Synchronous], cut: Cut, count: int) -> Sequence[Policy]:
        """The same sums, cut anew."""
        everyone = (self, *others)
        totals = [unit._total for unit in everyone if unit._total is not None]
        new_totals = cut(totals) if totals else [None] * count
        early = {worker: cut([unit._early[worker] for unit in everyone]) for worker in self._early}
        result = [Synchronous(self._num_workers) for _ in range(count)]
        for i, unit in enumerate(result):
            unit._next_worker, unit._attributes, unit._total = self._next_worker, self._attributes, new_totals[i]
            unit._op = self._op
            unit._early = {worker: arrays[i] for worker, arrays in early.items()}
        return result


class Asynchronous:
    """Applies every push at once."""

    counts = False

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def push(
        self, worker: int, gradient: HostArray, attributes: AttributesId, memory: Memory, op: Reduction = SUM
    ) -> Update | None:
        """The gradient itself."""
        return Update((gradient,), attributes)

    def regrouped(self, others: Sequence[Asynchronous], cut: Cut, count: int) -> Sequence[Policy]:
        """Nothing waits here."""
        return [Asynchronous(self._num_workers) for _ in range(count)]
