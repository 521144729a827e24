"""Broadcasts one worker's parameters, optimizer states and objects to all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from mpikv.arrays.as_numpy import dtype_of
from mpikv.errors import ShapeMismatch
from mpikv.kvstore import KVStore
from mpikv.torch import buffers
from mpikv.torch.arrays import array_of, tensor_of
from mpikv.torch.default import calls_of


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0, store: KVStore | None = None
) -> None:
    """Write worker `root_rank`'s values into these tensors on every worker. Collective, blocks.

    params: a `state_dict`, or names with tensors (`named_parameters`); other values are ignored. Raises ShapeMismatch
    on every worker if the names differ.

    >>> mt.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), store=kv.create('local'))
    """
    if isinstance(params, torch.nn.Module):
        raise TypeError("broadcast_parameters: give the module's state_dict() or named_parameters()")
    named = sorted(params.items() if isinstance(params, Mapping) else params)
    tensors = [(name, value.data) for name, value in named if isinstance(value, torch.Tensor)]
    calls = calls_of(store)
    calls.agree([name for name, _ in tensors], "the names given to broadcast_parameters", ShapeMismatch)
    buffers.broadcast(calls, [tensor for _, tensor in tensors], root_rank, "parameters")


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, store: KVStore | None = None) -> Any:
    """Return worker `root_rank`'s object, which must be picklable; on other workers `obj` is not used.

    Collective, blocks.

    >>> mt.broadcast_object({'epoch': 3}, store=kv.create('local'))
    {'epoch': 3}
    """
    calls = calls_of(store)
    mine = calls.store.rank == root_rank
    content = np.frombuffer(cloudpickle.dumps(obj), np.uint8) if mine else np.empty(0, np.uint8)
    length = int(calls.broadcast([np.array([content.size], np.int64)], root_rank, name)[0][0])
    found = calls.broadcast([content if mine else np.empty(length, np.uint8)], root_rank, name)[0]
    return obj if mine else cloudpickle.loads(found.tobytes())


class _TensorSlot(NamedTuple):
    """Takes the position of a tensor, which is sent separately, in a nest of dicts, lists and tuples."""

    number: int
    dtype: str
    shape: tuple[int, ...]


def _without_tensors(value: Any, found: list[torch.Tensor]) -> Any:
    """Copy a nest of dicts, lists and tuples, with a slot for each tensor; the tensors are appended to `found`."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return _TensorSlot(len(found) - 1, str(array_of(value).dtype), tuple(value.shape))
    if isinstance(value, dict):
        return {key: _without_tensors(one, found) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_without_tensors(one, found) for one in value)
    return value


def _slots(value: Any) -> list[_TensorSlot]:
    if isinstance(value, _TensorSlot):
        return [value]
    if isinstance(value, dict):
        return [slot for one in value.values() for slot in _slots(one)]
    return [slot for one in value for slot in _slots(one)] if isinstance(value, (list, tuple)) else []


def _with_tensors(value: Any, found: list[torch.Tensor]) -> Any:
    if isinstance(value, _TensorSlot):
        return found[value.number]
    if isinstance(value, dict):
        return {key: _with_tensors(one, found) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(one, found) for one in value)
    return value


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, store: KVStore | None = None
) -> None:
    """Set the optimizer's state and options (learning rates, ...) to worker `root_rank`'s. Collective, blocks.

    Raises ShapeMismatch on every worker if the optimizers differ in class or numbers of parameters.

    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.5)
    >>> mt.broadcast_optimizer_state(optimizer, store=kv.create('local'))
    """
    calls = calls_of(store)
    kind = type(optimizer).__name__
    counts = [len(group["params"]) for group in optimizer.param_groups]
    calls.agree([f"{kind} of groups of {counts} parameters"], "broadcast_optimizer_state", ShapeMismatch)
    tensors: list[torch.Tensor] = []
    nest = _without_tensors(optimizer.state_dict(), tensors) if calls.store.rank == root_rank else None
    nest = broadcast_object(nest, root_rank, "state of an optimizer", calls.store)
    arrays = (
        [array_of(tensor) for tensor in tensors]
        if calls.store.rank == root_rank
        else [np.empty(slot.shape, dtype_of(slot.dtype)) for slot in _slots(nest)]
    )
    arrays = calls.broadcast(arrays, root_rank, "state of an optimizer")
    if calls.store.rank != root_rank:
        optimizer.load_state_dict(_with_tensors(nest, [tensor_of(array) for array in arrays]))
