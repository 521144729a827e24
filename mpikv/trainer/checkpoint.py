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

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray, host_view, shape_and_dtype
from mpikv.arrays.row_sparse import RowSparse
from mpikv.common.checks import shown
from mpikv.common.files import open_regular, replacing
from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.optimizers import Optimizer, Step
from mpikv.optimizers.archive import DTYPES, damaged, free_name, read_archive, write_archive
from mpikv.optimizers.function import Function
from mpikv.optimizers.states_file import StatesFile, packed, unpacked
from mpikv.placement.keys import Key

KIND, KIND_OF_WORKER = "mpikv checkpoint", "mpikv state of a worker"

Kept = dict[str, HostArray] | None
"""What a worker keeps for itself; None: nothing, and it is not asked to load anything."""


class Checkpoint(NamedTuple):
    """The contents of a file. examples: how many the steps have used. of_workers: what each keeps for itself, or empty.

    agreed: the factor that workers agreed on and the number of workers, or empty if they have not agreed.
    """

    steps: int
    examples: float
    weights: Mapping[str, HostArray]
    states: StatesFile
    of_workers: Sequence[Kept] = ()
    agreed: Sequence[float] = ()


def write(path: str, checkpoint: Checkpoint) -> None:
    """Write a file; on an error an existing one does not change. Local. Raises OSError, UnsupportedError."""
    states = checkpoint.states
    content, arrays = packed([*states.entries.values(), *states.codecs], states.meta)
    content |= {
        "steps": checkpoint.steps,
        "examples": checkpoint.examples,
        "agreed": list(checkpoint.agreed),
        "weights": _add(arrays, "weights", checkpoint.weights),
        "workers": [_add(arrays, f"worker{i}", kept) for i, kept in enumerate(checkpoint.of_workers)],
    }
    with replacing(path) as file:
        write_archive(file, KIND, content, arrays)


def read(path: str, parameters: Mapping[str, Any]) -> Checkpoint:
    """Read a file, and check that it fits a model. parameters: arrays by name. Local. StatesFileError, OSError."""
    with open_regular(path) as file:
        content, arrays = read_archive(file, KIND, path)
    steps: Any = content.get("steps")
    examples: Any = content.get("examples")
    agreed: Any = content.get("agreed")
    workers = content.get("workers")
    counted = type(steps) is int and steps >= 0 and type(examples) in (int, float) and 0 <= examples < math.inf
    counted = counted and type(agreed) is list and all(type(one) in (int, float) for one in agreed)
    if not counted or len(agreed) not in (0, 2) or type(workers) is not list:
        damaged(path, f"damaged: {shown(steps)} steps, {shown(examples)} examples, {shown(agreed)}, {shown(workers)}")
    weights = _named(content.get("weights"), arrays, path)
    lacking, foreign = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if lacking or foreign:
        damaged(path, f"is of another model: it lacks {shown(lacking)} and has {shown(foreign)} that this one lacks")
    for name, array in parameters.items():
        ours, saved = shape_and_dtype(array, f"parameter {shown(name)}"), (weights[name].shape, weights[name].dtype)
        if ours != saved:
            damaged(path, f"parameter {shown(name)} is {saved[1]} {saved[0]} there and {ours[1]} {ours[0]} here")
    of_workers = [None if one is None else _named(one, arrays, path) for one in workers]
    return Checkpoint(steps, examples, weights, unpacked(content, arrays, path), of_workers, agreed)


def _add(arrays: dict[str, HostArray], what: str, added: Mapping[str, HostArray] | None) -> dict[str, str] | None:
    """Add arrays to those of a file. Returns what they are called there."""
    if added is None:
        return None
    called = {}
    for name, array in added.items():
        called[name] = free_name(f"{what}/{name}", arrays)
        arrays[called[name]] = array
    return called


def _named(called: Any, arrays: Mapping[str, HostArray], path: str) -> dict[str, HostArray]:
    """Do the inverse of `_add`."""
    if type(called) is not dict or not all(type(one) is str and one in arrays for one in called.values()):
        damaged(path, f"damaged: arrays {shown(called)}")
    return {name: arrays[one] for name, one in called.items()}


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


def gather_kept(store: KVStore | None, kept: WorkerState | None) -> list[bytes]:
    """Return every worker's state at worker 0, for `kept_of`. Collective, blocks."""
    try:
        mine = _to_bytes(None if kept is None else _arrays_of(kept))
    except Exception as error:  # noqa: BLE001 - whatever it is, the other workers wait in this call
        mine = _to_bytes(None, str(error))
    return [mine] if store is None else store.session.gather("save", mine)


def kept_of(gathered: Sequence[bytes]) -> list[Kept]:
    """Return what was gathered, [] if no worker has a state; to be called where all share an error.

    Raises UnsupportedError if some worker's `state_dict` failed, or returned what cannot be saved.
    """
    found = []
    for worker, data in enumerate(gathered):
        kept, error = _from_bytes(data, "a worker's state")
        if error:
            raise UnsupportedError(f"worker {worker}: {error}")
        found.append(kept)
    return found if any(kept is not None for kept in found) else []


def give_kept(store: KVStore | None, kept: WorkerState | None, saved: Sequence[Kept], path: str) -> None:
    """Give each worker its own state. saved: those of all, or empty, at worker 0. Collective, blocks."""
    given = [_to_bytes(one) for one in saved] or [_to_bytes(None)] * (1 if store is None else store.num_workers)
    mine, _ = _from_bytes(given[0] if store is None else store.session.scatter("resume", given), path)
    if mine is not None and kept is not None:
        kept.load_state_dict(mine)


def _to_bytes(kept: Kept, error: str = "") -> bytes:
    arrays: dict[str, HostArray] = {}
    content = {"names": _add(arrays, "worker", kept), "error": error}
    write_archive(file := io.BytesIO(), KIND_OF_WORKER, content, arrays)
    return file.getvalue()


def _from_bytes(data: bytes, origin: str) -> tuple[Kept, str]:
    content, arrays = read_archive(io.BytesIO(data), KIND_OF_WORKER, origin)
    return None if content["names"] is None else _named(content["names"], arrays, origin), content["error"]


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
    store: KVStore, keys: list[Key], values: list[Any], outs: list[Any], optimizer: Optimizer | None, *, sparse: bool
) -> None:
    asynchronous = "async" in store.type
    if sparse:
        whole = [RowSparse.of(value) for value in values]
        values = whole if store.rank == 0 else [RowSparse.zeros(one.shape, one.dtype) for one in whole]
    elif store.rank != 0:
        values = [_neutral(*shape_and_dtype(value, "a weight")) for value in values]
    if optimizer is None:
        store.pushpull(keys, values, out=outs)
        return
    storing: Optimizer = _StoreRows()
    if not sparse:
        storing = Function(_store_pushed)
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


def _neutral(shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
    zeros: HostArray = np.zeros(shape, dtype)
    return zeros if dtype.kind in "iu" else np.negative(zeros)
