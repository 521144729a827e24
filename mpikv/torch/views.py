"""Tensors as flat arrays that the collectives read and write.

A contiguous tensor on the CPU is seen where it is. Any other goes through a contiguous copy in host memory; where it is
an output, the copy is written back at the end. Tensors on a GPU cross to the host and back, and say so once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from mpikv.arrays.as_numpy import BFLOAT16, HostArray
from mpikv.errors import UnsupportedError


def array_of(tensor: torch.Tensor) -> HostArray:
    """Return the elements of a contiguous CPU tensor, (n,), in the same memory; as bytes if NumPy lacks the dtype."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype == torch.bfloat16:
        bits: HostArray = flat.view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    try:
        found: HostArray = flat.numpy()
    except TypeError:  # float8 and the like: they can be moved, and adding them as bytes is refused
        found = flat.view(torch.uint8).numpy().view("V1")
    return found


class Views:
    """The arrays of one call's tensors. late: whether the thread that makes the call must write outputs back."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # output, and the copy to be written back to it
        self.late = False

    def read(self, tensors: Sequence[torch.Tensor]) -> list[HostArray]:
        """Return arrays of tensors that are only read."""
        return [array_of(self._hosted(tensor)) for tensor in tensors]

    def write(self, tensors: Sequence[torch.Tensor]) -> list[HostArray]:
        """Return arrays of tensors that are written; they may be read, too."""
        arrays = []
        for tensor in tensors:
            hosted = self._hosted(tensor)
            if hosted is not tensor:
                self._copies.append((tensor, hosted))
            arrays.append(array_of(hosted))
        return arrays

    @property
    def copies(self) -> bool:
        """Return whether `write_back` has something to do."""
        return bool(self._copies)

    def write_back(self) -> None:
        """Copy the results into the tensors that were not used where they are."""
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
        self.late = True  # the copy belongs to the stream of the thread that calls
        return tensor.detach().cpu().contiguous()


def same_kind(name: str, tensors: Sequence[Any]) -> None:
    """Raise TypeError unless these are tensors, ValueError unless they have one dtype."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: a tensor is expected, not {type(tensor).__name__}")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"{name}: tensors of one dtype are expected, not {sorted({str(t.dtype) for t in tensors})}")
