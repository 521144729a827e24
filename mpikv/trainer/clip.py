"""Clipping by the global norm: the gradients of one update are scaled down together.

The norm is that of the gradient which the update applies, the mean over all examples: not of each worker's, and not of
each parameter's. It is worked out from the sums, which have the same bits on all workers, and in an order of additions
that depends on no processor: so all workers find the same norm, and their weights stay the same.

Gradients on a GPU are squared and added there, with the same bits as on the host (spaces/folded.py).

Cost: a pass over all gradients; nothing is sent. From a GPU one number for each array comes to the host.
Source of the formula: torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from mpikv.optimizers import Optimizer
from mpikv.spaces.named import Spaces


def norm_of(optimizer: Optimizer, grads: Mapping[str, Sequence[Any]], spaces: Spaces) -> float:
    """Return the norm of what `optimizer` will apply. grads: sums by name, the same on every device. Local.

    Raises FloatingPointError where the norm is not finite.
    """
    whats = [f"the gradient of {name!r}" for name in grads]
    sums = spaces.sums_of_squares([replicas[0] for replicas in grads.values()], whats)
    norm = abs(optimizer.rescale_grad) * math.sqrt(functools.reduce(operator.add, sums, 0.0))
    if not math.isfinite(norm):
        raise FloatingPointError(f"clip_global_norm: the norm of the gradients is {norm}; no weight was changed")
    return norm


def factor_for(norm: float, limit: float) -> float:
    """Return the factor that brings gradients of this norm to at most `limit`."""
    return min(1.0, limit / (norm + 1e-6))
