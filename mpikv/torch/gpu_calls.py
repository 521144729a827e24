"""Horovod's allreduce of tensors on the store's GPU, without a copy to the host.

Workers first compare the shapes and dtypes of their tensors. Values are then pushed and pulled under a few keys that
are reused: one for each dtype and size class, whose memory is the store's, on the GPU. Long tensors are exchanged in
steps of 4 MiB, short ones are padded with zeros.

Cost of a call: one small exchange in host memory, an exchange for each step, and a copy in and out on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpikv.arrays.as_numpy import dtype_of
from mpikv.calls.keyless import CollectiveCalls
from mpikv.errors import ShapeMismatch
from mpikv.kvstore import KVStore
from mpikv.torch.arrays import dtype_name
from mpikv.torch.buckets import zeros_on_gpu

STEP_BYTES = 4 << 20  # bounds the memory that the store keeps for these keys
LEAST_BYTES = 64


def allreduce(calls: CollectiveCalls, tensors: Sequence[torch.Tensor], op: str, name: str | None) -> list[torch.Tensor]:
    """Return the workers' tensors combined by `op`, as new tensors. float16 and bfloat16 are combined in float32."""
    forms = ", ".join(f"{dtype_name(one)} {tuple(one.shape)}" for one in tensors)
    calls.agree([f"allreduce({op}, {name!r}) on a GPU of {forms}"], "a collective call", ShapeMismatch)
    results: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in tensors):
        chosen = [i for i, one in enumerate(tensors) if one.dtype == dtype]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in chosen])
        _combine(calls.store, flat, op)
        sizes = [tensors[i].numel() for i in chosen]
        results |= {i: one.view(tensors[i].shape) for i, one in zip(chosen, flat.split(sizes), strict=True)}
    return [results[i] for i in range(len(tensors))]


def _combine(store: KVStore, flat: torch.Tensor, op: str) -> None:
    step, divides = STEP_BYTES // flat.itemsize, op == "mean" and not (flat.is_floating_point() or flat.is_complex())
    for begin in range(0, flat.numel(), step):
        values = flat[begin : begin + step]
        key, memory = _key(store, values)
        memory[: values.numel()].copy_(values)
        memory[values.numel() :].zero_()
        store.pushpull(key, memory, op="sum" if divides else op)
        if divides:
            memory.div_(len(store.strategy.contributors(key)) or store.num_workers, rounding_mode="trunc")
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
