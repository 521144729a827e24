"""One worker's parameters, optimizer states and objects for all workers."""

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

    params: a `state_dict`, or names with tensors (`named_parameters`); what is no tensor is left alone. Raises
    ShapeMismatch on every worker where the names differ.

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
    """Return worker `root_rank`'s object, which must be picklable; on other workers `obj` does not matter.

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


class _Place(NamedTuple):
    """Stands for a tensor that travels by itself."""

    number: int
    dtype: str
    shape: tuple[int, ...]


def _taken_out(value: Any, found: list[torch.Tensor]) -> Any:
    """Copy a nest of dicts, lists and tuples, with a place in it for each tensor; the tensors go into `found`."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return _Place(len(found) - 1, str(array_of(value).dtype), tuple(value.shape))
    if isinstance(value, dict):
        return {key: _taken_out(one, found) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_taken_out(one, found) for one in value)
    return value


def _places(value: Any) -> list[_Place]:
    if isinstance(value, _Place):
        return [value]
    if isinstance(value, dict):
        return [place for one in value.values() for place in _places(one)]
    return [place for one in value for place in _places(one)] if isinstance(value, (list, tuple)) else []


def _put_back(value: Any, found: list[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return found[value.number]
    if isinstance(value, dict):
        return {key: _put_back(one, found) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_put_back(one, found) for one in value)
    return value


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, store: KVStore | None = None
) -> None:
    """Give the optimizer worker `root_rank`'s state and options (learning rates, ...). Collective, blocks.

    ShapeMismatch on every worker where the optimizers are of another kind or have other numbers of parameters.

    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.5)
    >>> mt.broadcast_optimizer_state(optimizer, store=kv.create('local'))
    """
    calls = calls_of(store)
    kind = type(optimizer).__name__
    counts = [len(group["params"]) for group in optimizer.param_groups]
    calls.agree([f"{kind} of groups of {counts} parameters"], "broadcast_optimizer_state", ShapeMismatch)
    tensors: list[torch.Tensor] = []
    nest = _taken_out(optimizer.state_dict(), tensors) if calls.store.rank == root_rank else None
    nest = broadcast_object(nest, root_rank, "state of an optimizer", calls.store)
    arrays = (
        [array_of(tensor) for tensor in tensors]
        if calls.store.rank == root_rank
        else [np.empty(place.shape, dtype_of(place.dtype)) for place in _places(nest)]
    )
    arrays = calls.broadcast(arrays, root_rank, "state of an optimizer")
    if calls.store.rank != root_rank:
        optimizer.load_state_dict(_put_back(nest, [tensor_of(array) for array in arrays]))
