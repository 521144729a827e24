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

from mpikv.arrays.as_numpy import HostArray, host_view, shape_and_dtype
from mpikv.arrays.row_sparse import RowSparse
from mpikv.common.checks import shown
from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.observe.stall import say
from mpikv.optimizers import Optimizer, Step
from mpikv.optimizers.archive import DTYPES, arrays_by_name, damaged, from_bytes, load, to_bytes
from mpikv.optimizers.function import Function
from mpikv.placement.keys import Key
from mpikv.session.base import Session

KIND, KIND_OF_WORKER = "mpikv checkpoint", "mpikv state of a worker"

Kept = dict[str, HostArray] | None
"""What a worker keeps for itself; None: nothing, and it is not asked to load anything."""


def read(path: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file, and check that it fits a model. parameters: arrays by name. Local.

    It has `steps`, `examples` (how many the steps have used), `agreed` (the factor that workers agreed on and their
    number, or nothing), `weights`, `workers` (what each keeps for itself, or nothing), and what a file of states has,
    which is checked where the states are loaded. Raises StatesFileError, OSError.
    """
    content = load(path, KIND)
    named: Any = (content.get(name) for name in ("steps", "examples", "agreed", "workers"))
    steps, examples, agreed, workers = named
    counted = type(steps) is int and steps >= 0 and type(examples) in (int, float) and 0 <= examples < math.inf
    counted = counted and type(agreed) is list and all(type(one) in (int, float) for one in agreed)
    if not counted or len(agreed) not in (0, 2) or type(workers) is not list:
        damaged(path, f"damaged: {shown(steps)} steps, {shown(examples)} examples, {shown(agreed)}, {shown(workers)}")
    for kept in workers:
        if kept is not None:
            arrays_by_name(kept, path)
    weights = arrays_by_name(content.get("weights"), path)
    lacking, foreign = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if lacking or foreign:
        damaged(path, f"is of another model: it lacks {shown(lacking)} and has {shown(foreign)} that this one lacks")
    check_fits(path, weights, parameters)
    return content


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
        """Return arrays by name, of any library."""

    def load_state_dict(self, state: dict[str, HostArray]) -> None:
        """Restore a state from NumPy arrays that `state_dict` has returned in another process."""


def check_kept(kept: Any) -> WorkerState | None:
    """Return the argument. Raises TypeError if it is not None and does not have both methods."""
    for name in ("state_dict", "load_state_dict"):
        if kept is not None and not callable(getattr(kept, name, None)):
            raise TypeError(f"worker_state: {shown(kept)} has no method {name}")
    found: WorkerState | None = kept
    return found


def gather_kept(session: Session, kept: WorkerState | None) -> list[bytes]:
    """Return every worker's state at worker 0, for `kept_of`. Collective, blocks."""
    mine, error = None, ""
    try:
        mine = None if kept is None else _arrays_of(kept)
    except Exception as raised:  # noqa: BLE001 - whatever it is, the other workers wait in this call
        error = str(raised)
    return session.gather("save", to_bytes(KIND_OF_WORKER, {"kept": mine, "error": error}))


def kept_of(gathered: Sequence[bytes]) -> list[Kept]:
    """Return what was gathered, [] if no worker has a state; to be called where all share an error.

    Raises UnsupportedError if some worker's `state_dict` failed, or returned what cannot be saved.
    """
    found = [from_bytes(data, KIND_OF_WORKER, "a worker's state") for data in gathered]
    for worker, one in enumerate(found):
        if one["error"]:
            raise UnsupportedError(f"worker {worker}: {one['error']}")
    return [one["kept"] for one in found] if any(one["kept"] is not None for one in found) else []


def give_kept(session: Session, kept: WorkerState | None, saved: Sequence[Kept], path: str) -> None:
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


def _arrays_of(kept: WorkerState) -> dict[str, HostArray]:
    try:
        given = kept.state_dict()
    except Exception as error:
        text = f"save: state_dict of worker_state raised {type(error).__name__}: {error}"
        raise UnsupportedError(text) from error
    if not isinstance(given, Mapping):
        raise UnsupportedError(f"save: state_dict of worker_state gave {shown(given)}, no arrays by their names")
    if not all(type(name) is str for name in given):
        raise UnsupportedError(f"save: worker_state has the names {shown(list(given))}; a checkpoint holds str alone")
    return {name: _on_host(value, f"save: {shown(name)} of worker_state") for name, value in given.items()}


def _on_host(value: Any, what: str) -> HostArray:
    if hasattr(value, "cpu"):  # a tensor, on any device
        value = value.detach().cpu()
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else host_view(value, what)
    if array.dtype not in DTYPES.values():
        names = ", ".join(str(dtype) for dtype in DTYPES.values())
        raise UnsupportedError(f"{what} has dtype {array.dtype}; a checkpoint holds {names}")
    return array


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
