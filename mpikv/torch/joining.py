"""Horovod's join: a worker that has no more data takes part in the others' steps and calls until all have joined.

It takes part in the rounds of the DistributedOptimizer that has stepped last, with gradients of zero, and says so in
the tail of the gradients; at the same time a thread takes part in allreduces (calls/keyless.py).
"""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future

from mpikv.errors import UnsupportedError
from mpikv.torch.default import calls_of
from mpikv.torch.gradients import Gradients


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
