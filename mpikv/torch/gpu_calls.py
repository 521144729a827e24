"""Horovod's allreduce, broadcast and allgather of tensors on the store's GPU, without a copy to the host.

Workers first compare the shapes and dtypes of their tensors. Values are then pushed and pulled under a few keys that
are reused: one for each dtype and size class, whose memory is the store's, on the GPU. Long tensors are exchanged in
steps of 4 MiB, short ones are padded with zeros. Broadcast and allgather are sums of bytes, to which all workers but
one add zero.

Cost of a call: one small exchange in host memory, an exchange for each step, and a copy in and out on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from mpikv.arrays.as_numpy import dtype_of
from mpikv.calls.keyless import CollectiveCalls
from mpikv.errors import ShapeMismatch
from mpikv.kvstore import KVStore
from mpikv.session.workers import Workers
from mpikv.torch.arrays import dtype_name, on_store
from mpikv.torch.buckets import zeros_on_gpu

STEP_BYTES = 4 << 20  # bounds the memory that the store keeps for these keys
LEAST_BYTES = 64


def allreduce(calls: CollectiveCalls, tensors: Sequence[torch.Tensor], op: str, name: str | None) -> list[torch.Tensor]:
    """Return the workers' tensors combined by `op`, as new tensors. float16 and bfloat16 are combined in float32."""
    forms = ", ".join(f"{dtype_name(one)} {tuple(one.shape)}" for one in tensors)
    _check_call(calls, f"allreduce({op}, {name!r}) on a GPU of {forms}")
    results: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in tensors):
        chosen = [i for i, one in enumerate(tensors) if one.dtype == dtype]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in chosen])
        if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            _add(calls.store, flat, "sum")
            flat.div_(calls.store.num_workers, rounding_mode="trunc")
        else:
            _add(calls.store, flat, op)
        sizes = [tensors[i].numel() for i in chosen]
        results |= {i: one.view(tensors[i].shape) for i, one in zip(chosen, flat.split(sizes), strict=True)}
    return [results[i] for i in range(len(tensors))]


def everywhere(calls: CollectiveCalls, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every worker has tensors, all of them on its store's GPU. Collective, unless no key can be on a GPU."""
    store, session = calls.store, calls.store.session
    mine = bool(tensors) and all(on_store(tensor, store) for tensor in tensors)
    if not isinstance(session, Workers) or store.num_workers == 1:
        return mine
    if session.members.device_path == "none":
        return False
    return int(calls.allreduce([np.array([mine], np.int64)])[0][0]) == store.num_workers


def broadcast(
    calls: CollectiveCalls, tensors: Sequence[torch.Tensor], root: int, name: str | None
) -> list[torch.Tensor]:
    calls.check_root(root)
    forms = ", ".join(f"{one.dtype} {tuple(one.shape)}" for one in tensors)
    _check_call(calls, f"broadcast(root {root}, {name!r}) on a GPU of {forms}")
    flat = torch.cat([_bytes(one) for one in tensors])
    if calls.store.rank != root:
        flat.zero_()
    _add(calls.store, flat, "sum")
    contents = flat.split([one.nbytes for one in tensors])
    return [_from_bytes(content, one.dtype, one.shape) for content, one in zip(contents, tensors, strict=True)]


def allgather(calls: CollectiveCalls, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    if not tensor.ndim:
        raise ValueError("allgather: a tensor without dimensions cannot be put behind others; give it one")
    rest = tuple(tensor.shape[1:])
    _check_call(calls, f"allgather({name!r}) on a GPU of {tensor.dtype} (any, {', '.join(map(str, rest))})")
    lengths = [int(n) for n in calls.allgather(np.array([len(tensor)], np.int64))]
    row_bytes, rank = tensor.itemsize * math.prod(rest), calls.store.rank
    flat = torch.zeros(sum(lengths) * row_bytes, dtype=torch.uint8, device=tensor.device)
    begin = sum(lengths[:rank]) * row_bytes
    flat[begin : begin + tensor.nbytes] = _bytes(tensor)
    _add(calls.store, flat, "sum")
    return _from_bytes(flat, tensor.dtype, (sum(lengths), *rest))


def _check_call(calls: CollectiveCalls, call: str) -> None:
    calls.agree([call], "a collective call", ShapeMismatch)
    calls.check_sums()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if values.stride(0) != 1:  # one element of a column counts as contiguous, and has no view as bytes
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8)


def _from_bytes(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor in new memory, which is aligned for its dtype."""
    return flat.clone().view(dtype).view(tuple(shape))


def _add(store: KVStore, flat: torch.Tensor, op: str) -> None:
    step = STEP_BYTES // flat.itemsize
    for begin in range(0, flat.numel(), step):
        values = flat[begin : begin + step]
        key, memory = _key(store, values)
        memory[: values.numel()].copy_(values)
        memory[values.numel() :].zero_()
        store.pushpull(key, memory, op=op)
        values.copy_(memory[: values.numel()])


def _key(store: KVStore, values: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return the key for values of this size, and its memory, which the store keeps. Collective at the first time."""
    kept: dict[str, torch.Tensor] = vars(store).setdefault("_torch_memory", {})
    dtype = dtype_name(values)
    size = size_class(values.nbytes) // dtype_of(dtype).itemsize
    key = f"mpikv collective calls on a GPU/{dtype} {size}"
    if key not in kept:
        (kept[key],) = zeros_on_gpu(store, [(size,)], dtype)
        store.session.compressions.exempt(key)  # the residual of one call must not be added to the next one
        store.init(key, kept[key])
    return key, kept[key]


def size_class(n_bytes: int) -> int:
    """Return the least size of a key that holds so many bytes; there are four in each power of two."""
    step = 1 << max(0, (n_bytes - 1).bit_length() - 3)
    return max(LEAST_BYTES, -(-n_bytes // step) * step)
