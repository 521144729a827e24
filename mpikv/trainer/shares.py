"""The share of each worker's examples in a step, which decides what its gradients are divided by.

If workers count their examples, or some of them have run out of data (`Trainer.join`), they exchange their numbers of
examples by one small `pushpull` of a table with a column for each worker (24 bytes). Then all compute the same divisor,
and a wrong call is an error on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.checks import shown
from mpikv.errors import MpikvError, PeerError, StallError, UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.optimizers import Optimizer
from mpikv.optimizers.function import Function
from mpikv.trainer.checkpoint import store_pushed

# The kinds of a worker's gradients. 0: it has none.
SUMS = 1  # over its examples
MEANS = 2  # over its examples
UNCOUNTED = 3  # means over an unknown number of examples
_CALLS = {SUMS: "step(batch_size)", MEANS: "step(examples=)", UNCOUNTED: "step()"}


class Share(NamedTuple):
    """How a step scales gradients. divisor: of the sum over all workers. factor: of this worker's gradients before.

    With the factor a worker's mean has the weight of its number of examples. examples: of all workers, 0 if unknown.
    weights: of workers, by their numbers at the start, where some may be gone before the sum is made. It is divided by
    the weights of those that are in it, too.
    """

    divisor: float
    factor: float = 1.0
    examples: float = 0
    weights: Sequence[float] | None = None


class Shares:
    """Determines the share of each step. key: of the table. devices: how many have a gradient of each parameter."""

    def __init__(self, store: KVStore | None, key: str, devices: int, optimizer: Optimizer) -> None:
        self._store = store
        self._key = key
        self._devices = devices
        self._optimizer = optimizer
        # Workers have columns, and weights, by their numbers at the start.
        self._rank, self._workers = (0, 1) if store is None else (store.session.number, store.session.at_start)
        # In an asynchronous store each gradient is applied by itself, whoever has died.
        self._continues = store is not None and store.session.continues and store.session.synchronous
        self._array: HostArray | None = None
        self.joined = False

    @property
    def n_gradients(self) -> int:
        """How many of each parameter a step adds."""
        return self._devices * (1 if self._store is None else self._store.num_workers)

    @property
    def _mean(self) -> Share:
        return Share(self._devices, weights=[1.0] * self._workers) if self._continues else Share(self.n_gradients)

    def of_step(self, batch_size: float | None, examples: float | None) -> Share:
        """Return the share for a `Trainer.step` with these arguments.

        Collective if workers count examples or are in `join`. Raises ValueError for a wrong number, and on all workers
        if they pass different arguments.
        """
        if batch_size is not None and examples is not None:
            raise ValueError("step: batch_size is for gradients that are sums, examples= for means; give one of them")
        if examples is None and not self.joined:
            return self._mean if batch_size is None else self.of_batch(batch_size)
        if examples is not None:
            kind, number = MEANS, positive(examples, "examples, the number of this worker's examples,")
        elif batch_size is not None:
            kind, number = SUMS, positive(batch_size, "batch_size, in join the number of this worker's examples,")
        else:
            kind, number = UNCOUNTED, 0.0
        return self._share(self._exchange(kind, number), self._rank)

    def of_batch(self, batch_size: float) -> Share:
        """Return the share of sums over so many examples of all workers. ValueError for a wrong number. Local."""
        number = positive(batch_size, "batch_size is the number of examples of all workers together, and")
        if self._store is None or not self._continues:
            return Share(number, examples=batch_size)
        # So much for each worker that will be in the sum; one that has died meanwhile is not.
        return Share(number / self._store.num_workers, examples=batch_size, weights=[1.0] * self._workers)

    def of_others(self) -> Share | None:
        """Take part in the others' next step, after this worker has run out of data, at their learning rate.

        Returns its share in that step; None: no worker makes one.
        """
        table = self._exchange(0, 0.0)
        kinds, _, rates = table
        present = np.flatnonzero(kinds)
        if not present.size:
            return None
        if self._optimizer.lr_scheduler is None:
            self._optimizer.learning_rate = float(rates[present[0]])
        return self._share(table, int(present[0]))._replace(factor=1.0)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Return a context in which a step includes only workers that have data. Entering it is collective."""
        if self.joined:
            raise MpikvError("join inside join of the same trainer: one block is around the whole loop")
        if self._store is not None:
            self._store.session.check_no_spares("join", "none can come in while a worker has no more data")
        self._init_table("join")
        self.joined = True
        try:
            yield
        finally:
            self.joined = False

    def _init_table(self, call: str) -> HostArray:
        if self._array is None:
            if self._store is not None and "async" in self._store.type:
                raise UnsupportedError(
                    f"{call}: workers of a {self._store.type} store do not wait for each other; call step() or "
                    "step(batch_size) on each as often as it has data"
                )
            self._array = np.zeros((3, self._workers))
            if self._store is not None:
                self._store.session.compressions.exempt(self._key)
                self._store.session.own_keys.add(self._key)
                self._store.init(self._key, self._array)
                # Without it, an optimizer that the program has set for the store would update the key.
                self._store.strategy.set_optimizer(Function(store_pushed), [self._key])
        return self._array

    def _exchange(self, kind: int, examples: float) -> HostArray:
        """Return kinds of gradients, numbers of examples and learning rates, (3, num_workers)."""
        array = self._init_table("step(examples=)")
        array[...] = 0
        array[:, self._rank] = kind, examples, self._optimizer.learning_rate
        if self._store is not None:
            self._store.pushpull(self._key, array)
        return array

    def _share(self, table: HostArray, worker: int) -> Share:
        of_workers, examples, _ = table
        present = np.flatnonzero(of_workers)
        kinds = {int(kind) for kind in of_workers[present]}
        if len(kinds) > 1:
            first = {kind: np.flatnonzero(of_workers == kind)[0] for kind in sorted(kinds)}
            calls = ", ".join(f"{_CALLS[kind]} on worker {worker}" for kind, worker in first.items())
            raise ValueError(f"a step that workers call in different ways: {calls}")
        if self._continues:
            return self._weighted(of_workers, examples, worker)
        if kinds == {UNCOUNTED}:
            return Share(float(present.size) * self._devices)
        total = float(np.sum(examples))
        if kinds == {SUMS}:
            return Share(total, examples=total)
        # This divisor stays the same from step to step, as long as the same workers have data.
        return Share(float(present.size) * self._devices, float(examples[worker]) * present.size / total, total)

    def _weighted(self, kinds: HostArray, examples: HostArray, worker: int) -> Share:
        """What `_share` gives where some of the workers may be gone before the gradients are added."""
        total = float(np.sum(examples))
        if UNCOUNTED in kinds:
            return Share(self._devices, weights=(kinds > 0).astype(float).tolist())
        if SUMS in kinds:
            return Share(1.0, examples=total, weights=examples.tolist())
        return Share(self._devices, float(examples[worker]), total, examples.tolist())


def positive(value: Any, what: str) -> float:
    """Return a finite number above 0. Raises ValueError, which begins with `what`, for anything else."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{what} is a number above 0; got {shown(value)}")
    return number


def in_steps(error: PeerError | StallError, step: int) -> PeerError | StallError:
    """Return the error of a wait counted in steps, as the program's loop does, where that is known.

    The rounds of a key, which the store counts, mean nothing to a user whose workers have different numbers of batches.
    """
    if error.behind is None:
        return error
    who, rounds = error.behind
    ended = "has left" if isinstance(error, PeerError) else "has not come to the next one"
    translated = type(error)(
        f"this worker is in step {step} of its Trainer, and {who} {ended} after step {max(0, step - rounds)}: did "
        "their epochs have different numbers of batches? SplitSampler gives all workers equally many examples where it "
        f"shuffles, or with last='drop'; in `with trainer.join():` some may have more. In detail: {error}"
    )
    translated.behind = error.behind
    if isinstance(error, StallError) and isinstance(translated, StallError):
        translated.deadlock = error.deadlock
    return translated
