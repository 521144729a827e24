"""Horovod's calls on tensors: allreduce, reducescatter, allgather, broadcast and alltoall, in their several forms.

Every worker makes the same calls in the same order, with tensors of the same shapes and dtypes: anything else is a
ShapeMismatch on every worker (a `name` is only compared; Horovod matches calls by it). Results are new tensors on the
tensor's device; the forms with `_` write into the tensor. All are collective and block, but for the `_async` forms:
these return a handle for `synchronize` and `poll`, and a thread makes the call. Without MPI_THREAD_MULTIPLE, and for
tensors on a device, they block, too. Tensors that were given to them must not be changed before `synchronize`.

Arguments have Horovod's names and order; where a function has no list of them, they are those of its first form. op:
Average, Sum, Min, Max or Product; average: True or False in place of Average and Sum. The mean of whole numbers is cut
towards zero. prescale_factor, postscale_factor: tensors are multiplied by the first before, by the second after.
compression: an object such as `Compression.fp16`, which converts what is sent; not in forms with `_`. process_set: the
workers among which the call is made. store, by name: the store whose workers make it, default that of `init`.
Gradients flow through calls that block and write into no tensor.

Cost: see calls/keyless.py. For gradients use DistributedModel or DistributedOptimizer, which are much faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.torch import tensor_calls
from mpikv.torch.compression import Compression, Compressor
from mpikv.torch.process_sets import ProcessSet, calls_in, root_in
from mpikv.torch.tensor_calls import Handle, Tensors, begun, blocking, set_

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]
__all__ += ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "sparse_allreduce_async"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
__all__ += ["barrier", "poll", "synchronize"]

Average, Sum, Min, Max, Product, Adasum = "mean", "sum", "min", "max", "prod", "adasum"
Splits: TypeAlias = torch.Tensor | Sequence[int] | None


# --- allreduce


def allreduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Return the mean over the workers, or what `op` says.

    Arguments: average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0,
    postscale_factor=1.0, process_set=global_process_set. Raises UnsupportedError for sparse tensors and Adasum.

    >>> one, store = torch.ones(2), kv.create('local')
    >>> mt.allreduce(one, prescale_factor=3.0, store=store), mt.grouped_allreduce([one], op=mt.Sum, store=store)
    (tensor([3., 3.]), [tensor([1., 1.])])
    >>> mt.allreduce_(one, store=store), mt.grouped_allreduce_([one], store=store)
    (tensor([1., 1.]), [tensor([1., 1.])])
    >>> begun = [mt.allreduce_async(one, store=store), mt.grouped_allreduce_async([one], store=store)]
    >>> begun += [mt.allreduce_async_(one, store=store), mt.grouped_allreduce_async_([one], store=store)]
    >>> [mt.synchronize(handle) for handle in begun]
    [tensor([1., 1.]), [tensor([1., 1.])], tensor([1., 1.]), [tensor([1., 1.])]]
    """
    return grouped_allreduce([tensor], *arguments, **options)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    *arguments: Any,
    **options: Any,
) -> list[torch.Tensor]:
    """Do what `allreduce` does, with several tensors. Example: see `allreduce`."""
    return _compressed(_allreduce(average, name, *arguments, **options), _tensors("allreduce", tensors), compression)


def allreduce_(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Do what `allreduce` does, into the tensor. Example: see `allreduce`."""
    return grouped_allreduce_([tensor], *arguments, **options)[0]


def grouped_allreduce_(tensors: Tensors, *arguments: Any, **options: Any) -> list[torch.Tensor]:
    """Do what `allreduce` does, into several tensors. Example: see `allreduce`."""
    results = _allreduce(*arguments, **options).make(_tensors("allreduce", tensors))
    return [set_(tensor, result) for tensor, result in zip(tensors, results, strict=True)]


def allreduce_async(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Handle:
    """Begin what `allreduce` does. Example: see `allreduce`."""
    return begun(_allreduce(*arguments, **options), _tensors("allreduce", [tensor]))


def allreduce_async_(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Handle:
    """Begin what `allreduce_` does. Example: see `allreduce`."""
    return begun(_allreduce(*arguments, **options), _tensors("allreduce", [tensor]), into=[tensor])


def grouped_allreduce_async(tensors: Tensors, *arguments: Any, **options: Any) -> Handle:
    """Begin what `grouped_allreduce` does. Example: see `allreduce`."""
    return begun(_allreduce(*arguments, **options), _tensors("allreduce", tensors), result=list)


def grouped_allreduce_async_(tensors: Tensors, *arguments: Any, **options: Any) -> Handle:
    """Begin what `grouped_allreduce_` does. Example: see `allreduce`."""
    return begun(_allreduce(*arguments, **options), _tensors("allreduce", tensors), into=tensors, result=list)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: str = Average, *arguments: Any, **options: Any
) -> Handle:
    """Begin to add sparse COO tensors of one shape; `handle()` returns the result, too. op: Average or Sum.

    Cost: all workers' entries are sent to every worker.

    >>> mt.sparse_allreduce_async(torch.ones(2).to_sparse(), store=kv.create('local'))().to_dense()
    tensor([1., 1.])
    """
    if op not in (Average, Sum):
        raise UnsupportedError(f"sparse_allreduce_async: op is Average or Sum; got {op!r}")
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        raise TypeError("sparse_allreduce_async: a sparse tensor of layout torch.sparse_coo is needed")
    return begun(tensor_calls.SparseAllreduce(calls_in(*arguments, **options), name, op), [tensor])


# --- reducescatter


def reducescatter(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Return this worker's rows of what `allreduce` returns: the first worker has the first ones, and so on.

    Rows that cannot be shared out evenly go to the first workers, one each. Arguments: name=None,
    compression=Compression.none, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0.

    >>> one, store = torch.ones(2), kv.create('local')
    >>> mt.reducescatter(one, store=store), mt.grouped_reducescatter([one], store=store)
    (tensor([1., 1.]), [tensor([1., 1.])])
    >>> mt.synchronize(mt.reducescatter_async(one, store=store))
    tensor([1., 1.])
    >>> mt.synchronize(mt.grouped_reducescatter_async([one], store=store))
    [tensor([1., 1.])]
    """
    return grouped_reducescatter([tensor], *arguments, **options)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Compressor = Compression.none,
    *arguments: Any,
    **options: Any,
) -> list[torch.Tensor]:
    """Do what `reducescatter` does, with several tensors. Example: see `reducescatter`."""
    return _compressed(_reducescatter(name, *arguments, **options), _rows("reducescatter", tensors), compression)


def reducescatter_async(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Handle:
    """Begin what `reducescatter` does, without `compression`. Example: see `reducescatter`."""
    return begun(_reducescatter(*arguments, **options), _rows("reducescatter", [tensor]))


def grouped_reducescatter_async(tensors: Tensors, *arguments: Any, **options: Any) -> Handle:
    """Begin what `grouped_reducescatter` does, without `compression`. Example: see `reducescatter`."""
    return begun(_reducescatter(*arguments, **options), _rows("reducescatter", tensors), result=list)


# --- allgather


def allgather(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Return all workers' tensors concatenated; their first dimensions may differ.

    Arguments: name=None, process_set=global_process_set.

    >>> one, store = torch.ones(2), kv.create('local')
    >>> mt.allgather(one, store=store), mt.grouped_allgather([one], store=store)
    (tensor([1., 1.]), [tensor([1., 1.])])
    >>> begun = mt.allgather_async(one, store=store), mt.grouped_allgather_async([one], store=store)
    >>> [mt.synchronize(handle) for handle in begun]
    [tensor([1., 1.]), [tensor([1., 1.])]]
    """
    return grouped_allgather([tensor], *arguments, **options)[0]


def grouped_allgather(tensors: Tensors, *arguments: Any, **options: Any) -> list[torch.Tensor]:
    """Do what `allgather` does, with several tensors. Example: see `allgather`."""
    return blocking(_allgather(*arguments, **options), _rows("allgather", tensors))


def allgather_async(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Handle:
    """Begin what `allgather` does. Example: see `allgather`."""
    return begun(_allgather(*arguments, **options), _rows("allgather", [tensor]))


def grouped_allgather_async(tensors: Tensors, *arguments: Any, **options: Any) -> Handle:
    """Begin what `grouped_allgather` does. Example: see `allgather`."""
    return begun(_allgather(*arguments, **options), _rows("allgather", tensors), result=list)


# --- broadcast


def broadcast(tensor: torch.Tensor, root_rank: int, *arguments: Any, **options: Any) -> torch.Tensor:
    """Return worker `root_rank`'s tensor; its number is that among all workers, also with a process set.

    Arguments: name=None, process_set=global_process_set.

    >>> one, store = torch.ones(2), kv.create('local')
    >>> mt.broadcast(one, root_rank=0, store=store), mt.broadcast_(one, 0, store=store)
    (tensor([1., 1.]), tensor([1., 1.]))
    >>> begun = mt.broadcast_async(one, 0, store=store), mt.broadcast_async_(one, 0, store=store)
    >>> [mt.synchronize(handle) for handle in begun]
    [tensor([1., 1.]), tensor([1., 1.])]
    """
    return blocking(_broadcast(root_rank, *arguments, **options), _tensors("broadcast", [tensor]))[0]


def broadcast_(tensor: torch.Tensor, root_rank: int, *arguments: Any, **options: Any) -> torch.Tensor:
    """Do what `broadcast` does, into the tensor. Example: see `broadcast`."""
    (result,) = _broadcast(root_rank, *arguments, **options).make(_tensors("broadcast", [tensor]))
    return set_(tensor, result)


def broadcast_async(tensor: torch.Tensor, root_rank: int, *arguments: Any, **options: Any) -> Handle:
    """Begin what `broadcast` does. Example: see `broadcast`."""
    return begun(_broadcast(root_rank, *arguments, **options), _tensors("broadcast", [tensor]))


def broadcast_async_(tensor: torch.Tensor, root_rank: int, *arguments: Any, **options: Any) -> Handle:
    """Begin what `broadcast_` does. Example: see `broadcast`."""
    return begun(_broadcast(root_rank, *arguments, **options), _tensors("broadcast", [tensor]), into=[tensor])


# --- alltoall


def alltoall(tensor: torch.Tensor, splits: Splits = None, *arguments: Any, **options: Any) -> Any:
    """Return to worker i the i-th slices of all workers' tensors, concatenated.

    splits: the length of each slice along the first dimension; None: equal lengths. With splits, returns the tensor and
    the length of each worker's slice in it. Arguments: name=None, process_set=global_process_set. Cost: all workers'
    tensors are sent to every worker.

    >>> store = kv.create('local')
    >>> mt.alltoall(torch.tensor([5, 6, 7]), splits=[3], store=store)
    (tensor([5, 6, 7]), tensor([3], dtype=torch.int32))
    >>> mt.synchronize(mt.alltoall_async(torch.ones(2), store=store))
    tensor([1., 1.])
    """
    found = blocking(_alltoall(tensor, splits, *arguments, **options), [tensor])
    return found[0] if splits is None else tuple(found)


def alltoall_async(tensor: torch.Tensor, splits: Splits = None, *arguments: Any, **options: Any) -> Handle:
    """Begin what `alltoall` does. Example: see `alltoall`."""
    call = _alltoall(tensor, splits, *arguments, **options)
    return begun(call, [tensor]) if splits is None else begun(call, [tensor], result=tuple)


# --- the rest


def synchronize(handle: Handle) -> Any:
    """Return the result of an `_async` call, or raise its error. Blocks until the call has ended.

    >>> handle = mt.allreduce_async(torch.ones(2), store=kv.create('local'))
    >>> mt.synchronize(handle), mt.poll(handle)
    (tensor([1., 1.]), True)
    """
    return _checked(handle)()


def poll(handle: Handle) -> bool:
    """Return whether an `_async` call has ended. Local. Example: see `synchronize`."""
    return _checked(handle).future.done()


def barrier(process_set: ProcessSet | None = None, store: KVStore | None = None) -> None:
    """Wait until all workers have called it.

    >>> mt.barrier(store=kv.create('local'))
    """
    calls_in(process_set, store).store.barrier()


# --- arguments


def _checked(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(f"the handle of an _async call is needed, not {type(handle).__name__}")
    return handle


def _tensors(call: str, values: Sequence[Any]) -> list[torch.Tensor]:
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{call}: a tensor is needed, not {type(value).__name__}")
        if value.layout != torch.strided:
            raise UnsupportedError(f"{call}: a tensor of layout {value.layout}; use sparse_allreduce_async")
    return list(values)


def _rows(call: str, values: Sequence[Any]) -> list[torch.Tensor]:
    found = _tensors(call, values)
    if any(not tensor.ndim for tensor in found):
        raise ValueError(f"{call}: a tensor without dimensions has no rows; give it a dimension")
    return found


def _allreduce(  # noqa: PLR0917 - Horovod's order
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    store: KVStore | None = None,
) -> tensor_calls.Allreduce:
    if average is not None and not isinstance(average, bool):
        raise TypeError(f"average is True or False, not {average!r} (the name comes after it)")
    if average is not None and op is not None:
        raise ValueError(f"give average={average} or op={op!r}, not both")
    op = _checked_op(op or (Sum if average is False else Average))
    return tensor_calls.Allreduce(calls_in(process_set, store), name, op, prescale_factor, postscale_factor)


def _reducescatter(  # noqa: PLR0917 - Horovod's order
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    store: KVStore | None = None,
) -> tensor_calls.ReduceScatter:
    calls = calls_in(process_set, store)
    return tensor_calls.ReduceScatter(calls, name, _checked_op(op), prescale_factor, postscale_factor)


def _checked_op(op: str) -> str:
    if op == Adasum:
        raise UnsupportedError("Adasum of tensors is made by store.pushpull(key, tensor, op='adasum') alone")
    return op


def _allgather(name: str | None = None, *among: Any, **options: Any) -> tensor_calls.Allgather:
    return tensor_calls.Allgather(calls_in(*among, **options), name)


def _broadcast(
    root: int, name: str | None = None, process_set: ProcessSet | None = None, store: KVStore | None = None
) -> tensor_calls.Broadcast:
    return tensor_calls.Broadcast(calls_in(process_set, store), name, root_in(process_set, root))


def _alltoall(
    tensor: torch.Tensor, splits: Splits, name: str | None = None, *among: Any, **options: Any
) -> tensor_calls.AllToAll:
    (given,) = _tensors("alltoall", [tensor])
    calls = calls_in(*among, **options)
    n, length = calls.store.num_workers, given.shape[0] if given.ndim else -1
    counts = [length // n] * n if splits is None else torch.as_tensor(splits).tolist()
    whole = all(isinstance(count, int) for count in counts)
    if not whole or length < 0 or len(counts) != n or min(counts) < 0 or sum(counts) != length:
        raise ValueError(
            f"alltoall: the first dimension of a tensor of shape {tuple(given.shape)} is cut into {n} parts that "
            f"make up all of it; got {counts}"
        )
    return tensor_calls.AllToAll(calls, name, counts)


def _compressed(call: tensor_calls.Allreduce, tensors: Tensors, compression: Compressor) -> list[torch.Tensor]:
    if not isinstance(compression, Compressor):
        raise TypeError(f"compression has compress and decompress, such as Compression.fp16; got {compression!r}")
    sent = [compression.compress(tensor) for tensor in tensors]
    results = blocking(call, [tensor for tensor, _ in sent])
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, sent, strict=True)]
