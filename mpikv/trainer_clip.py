"""Clipping by the global norm: the gradients of one update are scaled down together.

The norm is that of the gradient which the update applies, the mean over all examples: not of each worker's, and not of
each parameter's. It is worked out from the sums, which have the same bits on all workers, and in an order of additions
that depends on no processor: so all workers find the same norm, and their weights stay the same.

Cost: a pass over all gradients; nothing is sent.
Source of the formula: torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpikv.arrays import host_view
from mpikv.optimizers import Optimizer
from mpikv.optimizers.norms import global_norm


def norm_of(optimizer: Optimizer, grads: Mapping[str, Sequence[Any]]) -> float:
    """Return the norm of what `optimizer` will apply. grads: sums by name, the same on every device. Local.

    Raises FloatingPointError where the norm is not finite.
    """
    values = (host_view(replicas[0], f"the gradient of {name!r}") for name, replicas in grads.items())
    norm = abs(optimizer.rescale_grad) * global_norm(values)
    if not math.isfinite(norm):
        raise FloatingPointError(f"clip_global_norm: the norm of the gradients is {norm}; no weight was changed")
    return norm


def factor_for(norm: float, limit: float) -> float:
    """Return the factor that brings gradients of this norm to at most `limit`."""
    return min(1.0, limit / (norm + 1e-6))
