"""Converts tensors to NumPy arrays and back, without a copy if they are in host memory.

`Views` are the arrays of one collective call of `torch.distributed`: a tensor that is not contiguous in host memory is
copied to memory that is, and outputs are copied back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from mpikv.arrays import tensors
from mpikv.arrays.as_numpy import BFLOAT16, HostArray, dtype_named
from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.spaces.callers import gpu_of


def array_of(tensor: torch.Tensor) -> HostArray:
    """Return the values of a tensor: a view if they are in host memory, else a copy. Local."""
    return tensors.view(tensor.detach().to("cpu").resolve_conj().resolve_neg())


def flat_array_of(tensor: torch.Tensor) -> HostArray:
    """Return the elements of a contiguous CPU tensor, (n,), in the same memory; as bytes if NumPy lacks the dtype."""
    flat = tensor.detach().reshape(-1)
    try:
        return tensors.memory_of(flat)
    except TypeError:  # float8 and the like can be moved as bytes, whose sum is refused
        return tensors.memory_of(flat.view(torch.uint8)).view("V1")


def tensor_of(array: HostArray) -> torch.Tensor:
    """Make a tensor in the memory of a writable array. Local."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype, such as 'float32'. Raises UnsupportedError if a store cannot add it."""
    name = str(tensor.dtype).removeprefix("torch.")
    dtype_named(name)
    return name


def in_host_memory(tensor: torch.Tensor) -> bool:
    return bool(tensors.device_of(tensor).type == "cpu")


def exchanges(store: KVStore) -> bool:
    """Return whether gradients are added over workers, of which some may be gone by now."""
    return store.num_workers > 1 or store.session.continues


def on_store(tensor: torch.Tensor, store: KVStore) -> bool:
    return store.device is not None and gpu_of(tensor) == store.device


def warn_of_host_memory(what: str, parameters: Iterable[torch.Tensor], store: KVStore, stacklevel: int) -> None:
    """Warn if these parameters are on a device that the store does not use."""
    if all(in_host_memory(parameter) or on_store(parameter, store) for parameter in parameters):
        return
    if store.device is None:
        why = f"the store uses no GPU ({store.session.spaces.missing})"
    else:
        why = f"the store uses GPU {store.device}: move the model there, or set MPIKV_LOCAL_DEVICE"
    warnings.warn(
        f"{what}: gradients of parameters on a device go through host memory, which is slow: {why}",
        stacklevel=stacklevel + 1,
    )


def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a tensor of this size and stride fills its memory without gaps, in any order of dimensions."""
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


class Views:
    """The arrays of one call's tensors. in_caller: whether the calling thread must copy outputs back."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # output, and the copy on the host to copy back
        self.in_caller = False

    def read(self, tensors: Sequence[torch.Tensor]) -> list[HostArray]:
        """Return arrays of tensors that are only read."""
        return [flat_array_of(self._hosted(tensor)) for tensor in tensors]

    def write(self, tensors: Sequence[torch.Tensor]) -> list[HostArray]:
        """Return arrays of tensors that are written, and may be read, too."""
        arrays = []
        for tensor in tensors:
            hosted = self._hosted(tensor)
            if hosted is not tensor:
                self._copies.append((tensor, hosted))
            arrays.append(flat_array_of(hosted))
        return arrays

    @property
    def copies(self) -> bool:
        return bool(self._copies)

    def write_back(self) -> None:
        with torch.no_grad():
            for tensor, hosted in self._copies:
                tensor.copy_(hosted)

    def _hosted(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            raise UnsupportedError(f"a tensor of layout {tensor.layout}: the backend mpikv moves dense tensors only")
        if tensor.is_conj() or tensor.is_neg():
            return tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.device.type == "cpu":
            return tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        if tensor.device.type == "meta":
            raise UnsupportedError("a meta tensor has no values to move")
        warnings.warn(
            f"mpikv: tensors on {tensor.device.type} go through host memory, which is slow; give them to a backend of "
            "their own, such as nccl",
            RuntimeWarning,
            stacklevel=2,
        )
        self.in_caller = True  # the copies have to be in the stream of the calling thread
        return tensor.detach().cpu().contiguous()


def same_kind(name: str, tensors: Sequence[Any]) -> None:
    """Raise TypeError unless these are tensors, ValueError unless they have one dtype."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: a tensor is expected, not {type(tensor).__name__}")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"{name}: tensors of one dtype are expected, not {sorted({str(t.dtype) for t in tensors})}")
