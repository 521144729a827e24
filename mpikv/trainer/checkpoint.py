"""A checkpoint: a file with all that a training run needs to continue.

It is a file of optimizer states (optimizers/states_file.py) with more in it: the weights by their parameters' names,
the numbers of steps and examples, and what each worker keeps for itself.

A program may have a state that differs between workers: velocities of their own gradients, or of random number
generators. It passes an object with PyTorch's two methods: `state_dict()`, which returns arrays by name, and
`load_state_dict(state)`. Worker 0 writes the states of all workers, and a run with as many workers gives each worker
its own back.

Weights are restored into a store by its own calls: for one round the keys get an optimizer that stores the pushed sum.
Worker 0 pushes the values, and the others push -0.0, which changes no number it is added to, not even a zero's sign.

Cost: a file of the size of weights and states; worker 0 also holds the workers' own states, and reads twice that much.
Two messages for each worker; resuming sends every weight as one step does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray, shape_and_dtype
from mpikv.arrays.row_sparse import RowSparse
from mpikv.common.checks import shown
from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.observe.stall import say
from mpikv.optimizers import Optimizer, Step
from mpikv.optimizers.archive import arrays_by_name, damaged, from_bytes, load, to_bytes
from mpikv.optimizers.function import Function
from mpikv.placement.keys import Key
from mpikv.session.base import Session

KIND, KIND_OF_WORKER = "mpikv checkpoint", "mpikv state of a worker"


def read(path: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file, and check that it fits a model. parameters: arrays by name. Local.

    Raises StatesFileError, OSError.
    """
    content = load(path, KIND)
    check(content, path, parameters)
    return content


def check(content: Mapping[str, Any], path: str, parameters: Mapping[str, Any]) -> None:
    """Raise StatesFileError where a content is no checkpoint, or of another model. path: what errors call it.

    It has `steps`, `examples` (how many the steps have used), `agreed` (the factor that workers agreed on and their
    number, or nothing), `weights`, `workers` (what each keeps for itself, or nothing), and what a file of states has,
    which is checked where the states are loaded.
    """
    named: Any = (content.get(name) for name in ("steps", "examples", "agreed", "workers"))
    steps, examples, agreed, workers = named
    counted = type(steps) is int and steps >= 0 and type(examples) in (int, float) and 0 <= examples < math.inf
    counted = counted and type(agreed) is list and all(type(one) in (int, float) for one in agreed)
    if not counted or len(agreed) not in (0, 2) or type(workers) is not list:
        damaged(path, f"damaged: {shown(steps)} steps, {shown(examples)} examples, {shown(agreed)}, {shown(workers)}")
    if not all(one is None or type(one) is dict for one in workers):
        damaged(path, f"damaged: {shown(workers)} in place of what workers keep")
    weights = arrays_by_name(content.get("weights"), path)
    lacking, foreign = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if lacking or foreign:
        damaged(path, f"is of another model: it lacks {shown(lacking)} and has {shown(foreign)} that this one lacks")
    check_fits(path, weights, parameters)


def described(arrays: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return the shape and dtype of each array."""
    return {name: shape_and_dtype(array, f"parameter {shown(name)}") for name, array in arrays.items()}


def check_fits(origin: str, weights: Mapping[str, HostArray], parameters: Mapping[str, Any]) -> None:
    """Raise StatesFileError where a saved weight has another shape or dtype than the parameter's array."""
    for name, saved in weights.items():
        shape, dtype = shape_and_dtype(parameters[name], f"parameter {shown(name)}")
        if (saved.shape, saved.dtype) != (shape, dtype):
            damaged(origin, f"parameter {shown(name)} is {saved.dtype} {saved.shape} there and {dtype} {shape} here")


# --- what each worker keeps for itself


class WorkerState(Protocol):
    """An object with a worker's own state."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return dicts, lists and tuples of arrays, tensors, numbers, texts and None."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` has returned in another process, with arrays of NumPy and tensors of PyTorch."""


def check_kept(kept: Any) -> WorkerState | None:
    """Return the argument. Raises TypeError if it is not None and does not have both methods."""
    for name in ("state_dict", "load_state_dict"):
        if kept is not None and not callable(getattr(kept, name, None)):
            raise TypeError(f"worker_state: {shown(kept)} has no method {name}")
    found: WorkerState | None = kept
    return found


def give_kept(session: Session, kept: WorkerState | None, saved: Sequence[Any], path: str) -> None:
    """Give each worker its own state if there are as many workers. Collective, blocks.

    saved: those of all, at worker 0, or empty, as on workers that have not read the file.
    """
    num_workers = session.num_workers
    if saved and len(saved) != num_workers:
        if session.rank == 0 and kept is not None:
            text = f"mpikv: {path} has what each of {len(saved)} workers kept (worker_state)"
            say(f"{text}, and {num_workers} go on: they begin with none of it")
        saved = ()
    given = [to_bytes(KIND_OF_WORKER, {"kept": one}) for one in saved or [None] * num_workers]
    mine = from_bytes(session.scatter("resume", given), KIND_OF_WORKER, path)["kept"]
    if mine is not None and kept is not None:
        kept.load_state_dict(mine)


def state_of(kept: WorkerState | None) -> Mapping[str, Any] | None:
    """Return what a worker keeps, None for nothing. Raises UnsupportedError where it cannot say so."""
    try:
        found = None if kept is None else kept.state_dict()
    except Exception as error:
        text = f"state_dict of worker_state raised {type(error).__name__}: {error}"
        raise UnsupportedError(text) from error
    if kept is not None and not isinstance(found, Mapping):
        raise UnsupportedError(f"state_dict of worker_state gave {shown(found)}, no dict")
    return found


# --- weights


class _StoreRows(Optimizer):
    """Stores the pushed rows."""

    lazy = True

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """w = grad."""
        np.copyto(w, g)


def store_pushed(value: HostArray, pushed: HostArray, _state: Any) -> None:
    """Be an optimizer (`Function`) by which a key gets the sum that was pushed."""
    value[...] = pushed


def distribute(
    store: KVStore, keys: Sequence[Key], values: Sequence[Any], outs: Sequence[Any], optimizer: Optimizer | None
) -> None:
    """Set the keys to worker 0's `values`, and copy these into `outs` on all workers. Collective, blocks.

    values: on other workers than 0 any arrays of the same shapes and dtypes. optimizer: of the keys afterwards, without
    states; None: the store has none for them.
    """
    with store.session.compressions.suspend():
        for sparse in (False, True):
            some = [i for i, key in enumerate(keys) if store.session.infos[key].sparse == sparse]
            if some:
                these = [keys[i] for i in some], [values[i] for i in some], [outs[i] for i in some]
                _distribute(store, *these, optimizer, sparse=sparse)


def _distribute(
    store: KVStore, keys: list[Key], values: list[Any], outs: list[Any], optimizer: Optimizer | None, *, sparse: bool
) -> None:
    asynchronous = "async" in store.type
    if sparse:
        whole = [RowSparse.of(value) for value in values]
        values = whole if store.rank == 0 else [RowSparse.zeros(one.shape, one.dtype) for one in whole]
    elif store.rank != 0:
        values = [np.negative(np.zeros(*shape_and_dtype(value, "a weight"))) for value in values]
    if optimizer is None:
        store.pushpull(keys, values, out=outs)
        return
    storing: Optimizer = _StoreRows()
    if not sparse:
        storing = Function(store_pushed)
        storing.elementwise = optimizer.elementwise  # so that the keys' shards do not change
    store.strategy.set_optimizer(storing, keys)
    if not asynchronous or store.rank == 0:
        store.push(keys, values)
    if asynchronous:
        store.barrier()
    store.pull(keys, outs, ignore_sparse=False)
    if asynchronous:
        store.barrier()  # no worker may make its first step before all have pulled
    store.strategy.set_optimizer(optimizer, keys)
