"""Uneven data: a worker that has no more batches takes part in the others' rounds until no worker has any.

Inside `join` the workers exchange the numbers of examples of their batches when the first gradient of a round is
computed, and gradients are weighted by them, so that the update is the mean over all examples. A worker without data
counts 0 examples, and brings gradients of zero. In the end every worker gets the parameters, buffers and, if given, the
states of optimizer and scheduler of a worker that had data to the end.

Cost: one exchange of two numbers per worker and round, inside `join` only; at the end, if some worker ran out of data
before others, one broadcast of the model.

Horovod's `join` does without examples: a worker takes part in the rounds of the DistributedOptimizer that has stepped
last, with gradients of zero, and says so in the tail of the gradients; at the same time a thread takes part in
allreduces (calls/keyless.py).
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mpikv.calls.keyless import CollectiveCalls
from mpikv.errors import UnsupportedError
from mpikv.torch.default import calls_of
from mpikv.torch.gradients import Gradients
from mpikv.torch.states import broadcast_object, broadcast_optimizer_state


class Join:
    """The `join` of one model. average: whether gradients are weighted by examples, else added."""

    def __init__(
        self, calls: CollectiveCalls, gradients: Gradients, *, average: bool, synchronize_model: Callable[[int], None]
    ) -> None:
        self._calls = calls
        self._gradients = gradients
        self._average = average
        self._synchronize_model = synchronize_model
        self._key = f"{gradients.name}/examples"
        session = calls.store.session  # by the numbers that workers had at the start, of whom some may be gone
        self._me, self._counts = session.number, np.zeros((2, session.at_start), np.int64)
        self.active = False
        self.n_examples: int | None = None  # of this worker, since the last round; None: no forward pass
        self._present: np.ndarray | None = None  # which workers had data in the last round

    def before_round(self) -> None:
        """Set the factor of this round's gradients, inside `join`. Collective there."""
        if self.active:
            self._weigh(has_data=True)

    def _weigh(self, *, has_data: bool) -> bool:
        """Agree on the weights of this round. Returns whether any worker has data."""
        self._counts[:] = 0
        if has_data:
            self._counts[:, self._me] = 1, -1 if self.n_examples is None else self.n_examples
        self._calls.store.pushpull(self._key, self._counts)
        present, examples = self._counts.copy()
        self.n_examples = None
        if not present.any():
            return False
        if self._average and examples.min() < 0:
            raise UnsupportedError(
                f"join: worker {int(examples.argmin())} made a backward pass without a forward pass of the "
                "DistributedModel, whose argument tells the number of examples. Inside join call the model itself: "
                "model(x), not model.module(x), nor a method of the module"
            )
        self._present = present
        self._gradients.weigh(examples if self._average else present)
        self._gradients.source = int(np.flatnonzero(present)[0])
        return True

    @contextmanager
    def joined(self, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> Iterator[None]:
        if self.active:
            raise RuntimeError("join inside join of the same model")
        self._calls.store.session.check_no_spares("join", "none can come in while a worker has no more data")
        self._calls.agree([], "join")
        if self._key not in self._calls.store:
            self._calls.store.session.compressions.exempt(self._key)
            self._calls.store.session.own_keys.add(self._key)
            self._calls.store.init(self._key, self._counts)
        self.active, self.n_examples, self._present = True, None, None
        self._gradients.steps.joined = True
        try:
            yield
            self._join_others(optimizer, scheduler)
        finally:
            self.active = self._gradients.steps.joined = False
            self._gradients.weigh()
            self._gradients.source = 0

    def _join_others(self, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        """Take part in the rounds of the others, since this worker has no more data; then copy a model of theirs."""
        rounds = 0
        while self._weigh(has_data=False):
            self._gradients.finish()
            rounds += 1
        if rounds:
            for parameter in self._gradients.parameters:
                parameter.grad = None
        if self._present is None or self._present.all():
            return
        root = self._calls.whole(lambda: self._copy_model(optimizer, scheduler))
        if optimizer is None and rounds:
            warnings.warn(
                "join: this worker ran out of data before others and made fewer steps. Its parameters are those of "
                f"worker {root}, the state of its optimizer (momentum, counts of steps) is not: use "
                "join(optimizer=...), or an optimizer without a state",
                stacklevel=4,
            )

    def _copy_model(self, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> int:
        """Copy all that is trained from a worker that had data to the end, and is there; return its rank."""
        assert self._present is not None
        there = self._calls.store.session.numbers
        root = next((rank for rank, number in enumerate(there) if self._present[number]), 0)
        self._synchronize_model(root)
        if scheduler is not None:
            scheduler.load_state_dict(broadcast_object(scheduler.state_dict(), root, store=self._calls.store))
        if optimizer is not None:
            broadcast_optimizer_state(optimizer, root, store=self._calls.store)
        return root


def join(device: int = -1) -> int:
    """Take part in the steps and allreduces of the other workers until all have called this; return the last one.

    Means count the workers that have joined, too: their gradients and tensors are zero. Their weights stay: broadcast
    those of the worker that this returns. Steps are those of the DistributedOptimizer that has stepped last since the
    last join; with a compression object of the program's own it is not served. Calls other than allreduces raise
    ShapeMismatch where they are made. Collective over the workers of the default store, blocks. device: not used.

    >>> mt.init(kv.create('local'))
    >>> mt.join()
    0
    >>> mt.shutdown()
    """
    calls = calls_of(None)
    calls.store.session.check_all_stay("join needs", ", or use Trainer.join")
    last = vars(calls.store).pop("_torch_stepped", None)
    if last is not None:
        gc.collect()  # what the program has dropped is gone on all workers then
    gradients: Gradients | None = None if last is None else last()
    if gradients is None:
        return calls.join()
    if not calls.store.session.threaded:
        raise UnsupportedError("join after steps of a DistributedOptimizer needs an MPI with MPI_THREAD_MULTIPLE")
    if gradients.fired:
        raise RuntimeError("join after backward, but before step: gradients are being sent")
    of_calls: Future[int] = calls.store.workers_group.in_turn.begin(lambda: calls.join(patient=True))
    everybody = False
    while not everybody:
        for parameter in gradients.parameters:
            parameter.grad = None
        everybody = gradients.finish(joined=True)
    return of_calls.result()


def has_stepped(gradients: Gradients) -> None:
    """Let the next `join` serve these. Local."""
    vars(gradients.calls.store)["_torch_stepped"] = weakref.ref(gradients)
