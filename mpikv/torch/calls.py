"""Horovod's calls on tensors: allreduce, allgather, broadcast, alltoall, and their `_`, `_async` and grouped forms.

Every worker makes the same calls in the same order, with tensors of the same shapes and dtypes: anything else is a
ShapeMismatch on every worker (a `name` is only compared; Horovod matches calls by it). store: default as in `init`.
Results are new tensors, detached, on the tensor's device; the forms with `_` write into the tensor. All calls are
collective and block, also those with `_async`, whose handle is done when they return.

Cost: see calls/keyless.py. For gradients use DistributedModel or DistributedOptimizer, which are much faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from mpikv.calls.keyless import CollectiveCalls
from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.torch import gpu_calls
from mpikv.torch.arrays import array_of, on_store, tensor_of
from mpikv.torch.default import calls_of

Average, Sum, Min, Max, Product = "mean", "sum", "min", "max", "prod"


class Compression:
    """Horovod's compressions. For others use the name of a codec, or a dict as for `set_gradient_compression`.

    none: the compression that `set_gradient_compression` of the store has set; without such a call none. fp16:
    gradients and their sums are sent as float16 and added in float32.

    >>> print(mt.Compression.none, dict(mt.Compression.fp16))
    None {'type': 'fp16', 'pull': 'fp16'}
    """

    none: ClassVar[None] = None
    fp16: ClassVar[Mapping[str, Any]] = MappingProxyType({"type": "fp16", "pull": "fp16"})


class Handle:
    """The handle of an `_async` call, with its result."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result = result


def _tensors(call: str, values: Sequence[Any]) -> list[torch.Tensor]:
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{call}: a tensor is needed, not {type(value).__name__}")
        if value.is_sparse:
            raise UnsupportedError(f"{call}: sparse tensors cannot be added; use to_dense()")
    return list(values)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    *,
    op: str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    store: KVStore | None = None,
) -> list[torch.Tensor]:
    """Return the mean over the workers of each tensor. Collective, blocks.

    op: Average, Sum, Min, Max or Product; Average needs a floating dtype. prescale_factor, postscale_factor: the
    tensors are multiplied by the first one before, and by the second one after. name: compared between the workers.
    Raises ShapeMismatch on every worker if the calls differ; UnsupportedError for sparse tensors.

    >>> mt.grouped_allreduce([torch.ones(2), torch.ones(1)], op=mt.Sum, store=kv.create('local'))
    [tensor([1., 1.]), tensor([1.])]
    """
    given = _tensors("allreduce", tensors)
    scaled = [tensor.detach() if prescale_factor == 1 else tensor.detach() * prescale_factor for tensor in given]
    calls = calls_of(store)
    if given and all(on_store(tensor, calls.store) for tensor in given):
        found = gpu_calls.allreduce(calls, scaled, op, name)
    else:
        results = calls.allreduce([array_of(tensor) for tensor in scaled], op, name)
        found = [tensor_of(result).to(tensor.device) for result, tensor in zip(results, scaled, strict=True)]
    return found if postscale_factor == 1 else [one * postscale_factor for one in found]


def allreduce(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    op: str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    store: KVStore | None = None,
) -> torch.Tensor:
    """Do what `grouped_allreduce` does, with one tensor. Collective, blocks.

    >>> mt.allreduce(torch.ones(2), store=kv.create('local'))
    tensor([1., 1.])
    """
    return grouped_allreduce(
        [tensor], name, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor, store=store
    )[0]


def grouped_allreduce_(tensors: Sequence[torch.Tensor], name: str | None = None, **options: Any) -> list[torch.Tensor]:
    """Do what `grouped_allreduce` does, and write the results into the tensors. Collective, blocks.

    >>> mt.grouped_allreduce_([torch.ones(2)], postscale_factor=3.0, store=kv.create('local'))
    [tensor([3., 3.])]
    """
    results = grouped_allreduce(tensors, name, **options)
    return [_set(tensor, result) for tensor, result in zip(tensors, results, strict=True)]


def allreduce_(tensor: torch.Tensor, name: str | None = None, **options: Any) -> torch.Tensor:
    """Do what `allreduce` does, and write the result into the tensor. Collective, blocks.

    >>> mt.allreduce_(torch.ones(2), prescale_factor=3.0, store=kv.create('local'))
    tensor([3., 3.])
    """
    return grouped_allreduce_([tensor], name, **options)[0]


def allreduce_async(tensor: torch.Tensor, name: str | None = None, **options: Any) -> Handle:
    """Do what `allreduce` does; `synchronize` returns the result. Collective, blocks.

    >>> handle = mt.allreduce_async(torch.ones(2), store=kv.create('local'))
    >>> mt.poll(handle), mt.synchronize(handle)
    (True, tensor([1., 1.]))
    """
    return Handle(allreduce(tensor, name, **options))


def allreduce_async_(tensor: torch.Tensor, name: str | None = None, **options: Any) -> Handle:
    """Do what `allreduce_` does; `synchronize` returns the tensor. Collective, blocks.

    >>> mt.synchronize(mt.allreduce_async_(torch.ones(2), store=kv.create('local')))
    tensor([1., 1.])
    """
    return Handle(allreduce_(tensor, name, **options))


def allgather(tensor: torch.Tensor, name: str | None = None, store: KVStore | None = None) -> torch.Tensor:
    """Return all workers' tensors concatenated; their first dimensions may differ. Collective, blocks.

    >>> mt.allgather(torch.ones(2), store=kv.create('local'))
    tensor([1., 1.])
    """
    (given,) = _tensors("allgather", [tensor])
    return _allgather(calls_of(store), given, name)


def _allgather(calls: CollectiveCalls, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    if gpu_calls.everywhere(calls, [tensor]):
        return gpu_calls.allgather(calls, tensor, name)
    return tensor_of(calls.allgather(array_of(tensor), name)).to(tensor.device)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, store: KVStore | None = None
) -> torch.Tensor:
    """Return worker `root_rank`'s tensor. Collective, blocks.

    >>> mt.broadcast(torch.ones(2), root_rank=0, store=kv.create('local'))
    tensor([1., 1.])
    """
    (given,) = _tensors("broadcast", [tensor])
    calls = calls_of(store)
    if gpu_calls.everywhere(calls, [given]):
        return gpu_calls.broadcast(calls, [given], root_rank, name)[0]
    return tensor_of(calls.broadcast([array_of(given)], root_rank, name)[0]).to(tensor.device)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, store: KVStore | None = None
) -> torch.Tensor:
    """Do what `broadcast` does, and write the result into the tensor. Collective, blocks.

    >>> mt.broadcast_(torch.ones(2), root_rank=0, store=kv.create('local'))
    tensor([1., 1.])
    """
    return _set(tensor, broadcast(tensor, root_rank, name, store))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    store: KVStore | None = None,
) -> Any:
    """Return to worker i the i-th slices of all workers' tensors, concatenated. Collective, blocks.

    splits: the length of each slice along the first dimension; None: equal lengths. With splits, returns the tensor and
    the length of each worker's slice in it. Cost: all workers' tensors are sent to every worker.

    >>> mt.alltoall(torch.tensor([5, 6, 7]), splits=[3], store=kv.create('local'))
    (tensor([5, 6, 7]), tensor([3]))
    """
    (given,) = _tensors("alltoall", [tensor])
    calls = calls_of(store)
    rank, n = calls.store.rank, calls.store.num_workers
    length = given.shape[0] if given.ndim else -1
    mine = [length // n] * n if splits is None else [int(one) for one in splits]
    if length < 0 or len(mine) != n or min(mine) < 0 or sum(mine) != length:
        raise ValueError(
            f"alltoall: the first dimension of a tensor of shape {tuple(given.shape)} is cut into {n} parts that "
            f"make up all of it; got {mine}"
        )
    lengths = calls.allgather(np.array([mine], np.int64), name)
    everything = _allgather(calls, given, name)
    starts = np.cumsum([0, *lengths.sum(axis=1)])[:-1] + lengths[:, :rank].sum(axis=1)
    received = [int(one) for one in lengths[:, rank]]
    slices = [everything[begin : begin + k] for begin, k in zip(starts.tolist(), received, strict=True)]
    result = torch.cat(slices)
    return result if splits is None else (result, torch.tensor(received))


def synchronize(handle: Handle) -> torch.Tensor:
    """Return the result of an `_async` call. Local.

    >>> mt.synchronize(mt.allreduce_async(torch.ones(2), store=kv.create('local')))
    tensor([1., 1.])
    """
    if not isinstance(handle, Handle):
        raise TypeError(f"synchronize: the handle of an _async call is needed, not {type(handle).__name__}")
    return handle.result


def poll(handle: Handle) -> bool:
    """Return whether an `_async` call is done: it always is. Local.

    >>> mt.poll(mt.allreduce_async(torch.ones(2), store=kv.create('local')))
    True
    """
    synchronize(handle)
    return True


def _set(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.copy_(value)
