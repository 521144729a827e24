"""Horovod's allreduce of tensors on the store's GPU, without a copy to the host.

As in `CollectiveCalls`, workers first compare what they brought, and values travel through a few keys that are used
again and again: one for each dtype and size class, whose memory is the store's own, on the GPU. Long values go in
pieces of 4 MiB, short ones are filled up with zeros.

Cost of a call: one small exchange in host memory, an exchange for each piece, and a copy in and out on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpikv.arrays import dtype_of
from mpikv.collective_calls import PIECE_BYTES, CollectiveCalls, size_class
from mpikv.errors import ShapeMismatch, UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.torch.arrays import dtype_name
from mpikv.torch.buckets import zeros_on_gpu


def allreduce(calls: CollectiveCalls, tensors: Sequence[torch.Tensor], op: str, name: str | None) -> list[torch.Tensor]:
    """Return what the workers' tensors become, as new tensors. Collective, blocks. op: of `KVStore.pushpull`.

    float16 and bfloat16 are worked on in float32, and rounded once.
    """
    forms = ", ".join(f"{dtype_name(one)} {tuple(one.shape)}" for one in tensors)
    calls.agree([f"allreduce({op}, {name!r}) on a GPU of {forms}"], "a collective call", ShapeMismatch)
    if calls.store.has_optimizer:
        raise UnsupportedError(
            "the store has an optimizer for all keys, so it gives updated weights and not sums; make collective calls "
            "on another store"
        )
    results: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in tensors):
        chosen = [i for i, one in enumerate(tensors) if one.dtype == dtype]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in chosen])
        piece = PIECE_BYTES // flat.itemsize
        for begin in range(0, flat.numel(), piece):
            part = flat[begin : begin + piece]
            key, memory = _key(calls.store, part)
            memory[: part.numel()].copy_(part)
            memory[part.numel() :].zero_()
            calls.store.pushpull(key, memory, op=op)
            part.copy_(memory[: part.numel()])
        sizes = [tensors[i].numel() for i in chosen]
        results |= {i: one.view(tensors[i].shape) for i, one in zip(chosen, flat.split(sizes), strict=True)}
    return [results[i] for i in range(len(tensors))]


def _key(store: KVStore, values: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The key for values of this size, and its memory, which the store keeps. Collective at the first time."""
    kept: dict[str, torch.Tensor] = vars(store).setdefault("_torch_memory", {})
    dtype = dtype_name(values)
    size = size_class(values.nbytes) // dtype_of(dtype).itemsize
    key = f"mpikv collective calls on a GPU/{dtype} {size}"
    if key not in kept:
        (kept[key],) = zeros_on_gpu(store, [(size,)], dtype)
        store.session.compressions.exempt(key)  # what one call owes is not for the next one
        store.init(key, kept[key])
    return key, kept[key]
