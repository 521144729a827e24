"""A checkpoint: a file with all that a training run needs to continue.

It is one archive (optimizers/archive.py): the weights by their parameters' names, the file of optimizer states as
bytes, the numbers of steps and examples, and each worker's own state (worker_states.py). An error leaves an existing
file unchanged (files.py).

Weights are restored into a store by its own calls: for one round the keys get an optimizer that stores the pushed sum.
Worker 0 pushes the values, and the others push -0.0, which changes no number it is added to, not even a zero's sign.

Cost: a file of the size of weights and states, which worker 0 holds in memory once more while it writes or reads;
resuming sends every weight as one step does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray, host_view, shape_and_dtype
from mpikv.arrays.row_sparse import RowSparse
from mpikv.common.checks import shown
from mpikv.common.files import open_regular, replacing
from mpikv.errors import StatesFileError
from mpikv.kvstore import KVStore
from mpikv.optimizers import Function, Optimizer, Step
from mpikv.optimizers.archive import are_names, read_archive, write_archive
from mpikv.placement.keys import Key

KIND = "mpikv checkpoint"


class Checkpoint(NamedTuple):
    """The contents of a file. examples: how many the steps have used. states: the bytes of a file of states.

    of_workers: the bytes of each worker's own state, or empty. agreed: the factor that workers agreed on and the number
    of workers, or empty if they have not agreed.
    """

    steps: int
    examples: float
    weights: dict[str, HostArray]
    states: HostArray
    of_workers: Sequence[HostArray] = ()
    agreed: Sequence[float] = ()


def write(path: str, checkpoint: Checkpoint) -> None:
    """Write a file; on an error an existing one does not change. Local. Raises OSError."""
    content: dict[str, Any] = {
        "steps": checkpoint.steps,
        "examples": checkpoint.examples,
        "names": list(checkpoint.weights),
        "workers": len(checkpoint.of_workers),
        "agreed": list(checkpoint.agreed),
    }
    values = [*checkpoint.weights.values(), checkpoint.states, *checkpoint.of_workers]
    with replacing(path) as file:
        write_archive(file, KIND, content, values)


def read(path: str, parameters: Mapping[str, Any]) -> Checkpoint:
    """Read a file, and check that it fits a model. parameters: arrays by name. Local. StatesFileError, OSError."""
    with open_regular(path) as file:
        header, values = read_archive(file, KIND, path)
    steps: Any = header.get("steps")
    examples: Any = header.get("examples")
    workers: Any = header.get("workers", 0)
    names: Any = header.get("names")
    counted = type(steps) is int and steps >= 0 and type(examples) in (int, float) and 0 <= examples < math.inf
    counted = counted and type(workers) is int and workers >= 0
    agreed: Any = header.get("agreed", [])
    counted = counted and type(agreed) is list and all(type(one) in (int, float) for one in agreed)
    counted = counted and len(agreed) in (0, 2)
    if not counted or not are_names(names) or len(values) != len(names) + 1 + workers:
        what = f"{shown(names)} after {shown(steps)} steps of {shown(workers)} workers with {shown(examples)} examples"
        raise StatesFileError(f"{path}: damaged: {what} for {len(values)} arrays")
    weights = dict(zip(names, values, strict=False))
    lacking, foreign = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if lacking or foreign:
        raise StatesFileError(
            f"{path}: is of another model: it lacks {shown(lacking)} and has {shown(foreign)} that this one lacks"
        )
    for name, array in parameters.items():
        ours, saved = shape_and_dtype(array, f"parameter {shown(name)}"), (weights[name].shape, weights[name].dtype)
        if ours != saved:
            text = f"{saved[1]} {saved[0]} there and {ours[1]} {ours[0]} here"
            raise StatesFileError(f"{path}: parameter {shown(name)} is {text}")
    return Checkpoint(steps, examples, weights, values[len(names)], values[len(names) + 1 :], agreed)


def weights_of(parameters: Mapping[str, Any]) -> dict[str, HostArray]:
    """Return the values of arrays on any device, by name. Local."""
    return {name: host_view(array, f"parameter {shown(name)}") for name, array in parameters.items()}


class _StoreRows(Optimizer):
    """Stores the pushed rows."""

    lazy = True

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """w = grad."""
        np.copyto(w, g)


def _store_pushed(weight: HostArray, grad: HostArray, _state: Any) -> None:
    weight[...] = grad


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
    store: KVStore,
    keys: Sequence[Key],
    values: Sequence[Any],
    outs: Sequence[Any],
    optimizer: Optimizer | None,
    *,
    sparse: bool,
) -> None:
    if sparse:
        whole = [RowSparse.of(value) for value in values]
        values = whole if store.rank == 0 else [RowSparse.zeros(one.shape, one.dtype) for one in whole]
    elif store.rank != 0:
        values = [_neutral(*shape_and_dtype(value, "a weight")) for value in values]
    if optimizer is None:
        store.pushpull(list(keys), list(values), out=list(outs))
        return
    storing: Optimizer = _StoreRows()
    if not sparse:
        storing = Function(_store_pushed)
        storing.elementwise = optimizer.elementwise  # so that the keys' shards do not change
    store.strategy.set_optimizer(storing, keys)
    if "async" not in store.type:
        store.push(list(keys), list(values))
    else:
        if store.rank == 0:
            store.push(list(keys), list(values))
        store.barrier()
    store.pull(list(keys), list(outs), ignore_sparse=False)
    if "async" in store.type:
        store.barrier()  # no worker may make its first step before all have pulled
    store.strategy.set_optimizer(optimizer, keys)


def _neutral(shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
    zeros: HostArray = np.zeros(shape, dtype)
    return zeros if dtype.kind in "iu" else np.negative(zeros)
