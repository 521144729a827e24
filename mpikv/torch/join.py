"""Uneven data: a worker that has run out of batches goes on taking part until all workers have.

Inside `join` a worker says with its first gradient of a round how many examples its batch had. The gradients are then
weighted by these numbers, so that the update is the mean over all examples that were there; a worker that has run out
counts 0. It goes through the rounds of the others with gradients of zero, until nobody has data any more. Then every
worker gets the parameters, buffers and, if given, the states of optimizer and scheduler of a worker that had data to
the end.

Cost: one exchange of two numbers per worker and round, inside `join` only; at the end, where some worker ran out before
others, one broadcast of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mpikv.calls.keyless import CollectiveCalls
from mpikv.torch.gradients import Gradients
from mpikv.torch.states import broadcast_object, broadcast_optimizer_state


class Join:
    """The uneven data of one model. scale: the factor of a worker's gradients outside `join`.

    average: whether gradients are weighted at all; without it they are added up.
    synchronize_model: brings worker `root`'s model to all.
    """

    def __init__(
        self, calls: CollectiveCalls, gradients: Gradients, *, average: bool, synchronize_model: Callable[[int], None]
    ) -> None:
        self._calls = calls
        self._gradients = gradients
        self._average = average
        self._synchronize_model = synchronize_model
        self._scale = gradients.scale
        self._key = f"{gradients.name}/examples"
        self._counts = np.zeros((2, calls.store.num_workers), np.int64)
        self.active = False
        self.n_examples = 0  # of this worker, since the last round
        self._last: np.ndarray | None = None  # who was there in the last round

    def before_round(self) -> None:
        """Set the factor of this round's gradients. Outside `join` it is always the same. Collective inside."""
        if self.active:
            self._weigh(there=True)

    def _weigh(self, *, there: bool) -> bool:
        """Agree on the weights of this round. Returns whether any worker has data."""
        rank, store = self._calls.store.rank, self._calls.store
        self._counts[:] = 0
        if there:
            self._counts[:, rank] = 1, self.n_examples
        store.pushpull(self._key, self._counts)
        present, examples = self._counts.copy()
        self.n_examples = 0
        if not present.any():
            return False
        self._last = present
        total = int(examples.sum())
        weight = examples[rank] / total if total else 0.0
        self._gradients.scale = float(weight) if self._average else float(there)
        self._gradients.source = int(np.flatnonzero(present)[0])
        return True

    @contextmanager
    def joined(self, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> Iterator[None]:
        """See `DistributedModel.join`."""
        if self.active:
            raise RuntimeError("join inside join of the same model")
        self._calls.agree([], "join")
        if self._key not in self._calls.store:
            self._calls.store.session.compressions.exempt(self._key)
            self._calls.store.init(self._key, self._counts)
        self.active, self.n_examples, self._last = True, 0, None
        try:
            yield
            self._keep_up(optimizer, scheduler)
        finally:
            self.active = False
            self._gradients.scale, self._gradients.source = self._scale, 0

    def _keep_up(self, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        """Take part in the rounds of the others, since this worker has no more data."""
        rounds = 0
        while self._weigh(there=False):
            self._gradients.finish()
            rounds += 1
        if rounds:
            for parameter in self._gradients.parameters:
                parameter.grad = None
        if self._last is None or self._last.all():
            return
        root = int(np.flatnonzero(self._last)[0])
        self._synchronize_model(root)
        if scheduler is not None:
            scheduler.load_state_dict(broadcast_object(scheduler.state_dict(), root, store=self._calls.store))
        if optimizer is not None:
            broadcast_optimizer_state(optimizer, root, store=self._calls.store)
        elif rounds:
            warnings.warn(
                "join: this worker ran out of data before others and made fewer steps. Its parameters are those of "
                f"worker {root}, the state of its optimizer (momentum, counts of steps) is not: use "
                "join(optimizer=...), or an optimizer without a state",
                stacklevel=4,
            )
