"""Tensors as NumPy arrays and back, without a copy where both are in host memory.

bfloat16, which `Tensor.numpy` does not know, goes through its bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from mpikv.arrays import tensors
from mpikv.arrays.as_numpy import BFLOAT16, HostArray, dtype_named
from mpikv.kvstore import KVStore
from mpikv.spaces.callers import gpu_of


def array_of(tensor: torch.Tensor) -> HostArray:
    """Return the values of a tensor: a view where they are in host memory, a copy elsewhere. Local."""
    return tensors.view(tensor.detach().to("cpu").resolve_conj().resolve_neg())


def tensor_of(array: HostArray) -> torch.Tensor:
    """Make a tensor in the memory of an array that can be written to. Local."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a dtype, 'float32' for torch.float32. UnsupportedError for one that a store cannot add."""
    name = str(tensor.dtype).removeprefix("torch.")
    dtype_named(name)
    return name


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether the values can be exchanged where they are."""
    return bool(tensors.device_of(tensor).type == "cpu")


def on_store(tensor: torch.Tensor, store: KVStore) -> bool:
    """Return whether a tensor is on the GPU that the store uses."""
    return store.device is not None and gpu_of(tensor) == store.device


def warn_of_host_memory(what: str, parameters: Iterable[torch.Tensor], store: KVStore, stacklevel: int) -> None:
    """Warn where gradients of these parameters are on a device, and not on the one that the store uses."""
    if all(in_host_memory(parameter) or on_store(parameter, store) for parameter in parameters):
        return
    if store.device is None:
        why = f"the store uses no GPU ({store.session.spaces.missing})"
    else:
        why = f"the store uses GPU {store.device}: bring the model there, or set MPIKV_LOCAL_DEVICE"
    warnings.warn(
        f"{what}: gradients of parameters on a device go through host memory, which is slow: {why}",
        stacklevel=stacklevel + 1,
    )


def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a tensor like this fills its memory without gaps, in whatever order of dimensions."""
    expected = 1
    for step, n in sorted((step, n) for n, step in zip(size, stride, strict=True) if n > 1):
        if step != expected:
            return False
        expected *= n
    return True


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Find the tensors in a forward pass's arguments or result: in lists, tuples, dicts and objects with fields."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        value = vars(value).values() if hasattr(value, "__dataclass_fields__") else ()
    return [tensor for one in value for tensor in tensors_in(one)]
