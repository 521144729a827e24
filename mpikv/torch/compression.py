"""Horovod's compressions: objects that convert a tensor before a call and its result afterwards.

Those of `Compression` are also dicts for `set_gradient_compression`, so that a store's codec does the same for
gradients, in whole buckets. With any other object a `DistributedOptimizer` makes a call for the gradients.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import torch


@runtime_checkable
class Compressor(Protocol):
    """What a compression object can do. The context that `compress` returns is given to `decompress`."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and a context."""
        ...

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the result that the caller gets."""
        ...


class _ToDtype(dict[str, Any]):
    """Sends floating tensors in `dtype`; None: as they are."""

    def __init__(self, dtype: torch.dtype | None, **codec: Any) -> None:
        super().__init__(codec)
        self.dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.to(self.dtype if tensor.is_floating_point() else None), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """Horovod's compressions. For others use an object like them, the name of a codec, or a dict with its parameters.

    none: the compression that `set_gradient_compression` of the store has set; without such a call none. fp16:
    gradients and their sums are sent as float16 and added in float32.

    >>> mt.Compression.none, mt.Compression.fp16
    ({}, {'type': 'fp16', 'pull': 'fp16'})
    >>> mt.Compression.fp16.compress(torch.ones(2))
    (tensor([1., 1.], dtype=torch.float16), torch.float32)
    """

    none: ClassVar[_ToDtype] = _ToDtype(None)
    fp16: ClassVar[_ToDtype] = _ToDtype(torch.float16, type="fp16", pull="fp16")
