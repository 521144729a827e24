"""Clipping by the global norm: all gradients of one update are scaled down by one factor.

The norm is that of the gradient which the update applies, the mean over all examples, and of all parameters together.
It is computed from the sums, which have the same bits on all workers, and in an order of additions that does not depend
on the processor. So all workers compute the same norm, and their weights stay the same.

Gradients on a GPU are squared and added there, with the same bits as on the host (spaces/folded.py).

Cost: a pass over all gradients; nothing is sent. One number for each array is copied from a GPU to the host.
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
    """Return the norm of the gradients that `optimizer` will apply. grads: sums by name, equal on all devices. Local.

    Raises FloatingPointError if the norm is not finite.
    """
    whats = [f"the gradient of {name!r}" for name in grads]
    sums = spaces.sums_of_squares([replicas[0] for replicas in grads.values()], whats)
    norm = abs(optimizer.rescale_grad) * math.sqrt(functools.reduce(operator.add, sums, 0.0))
    if not math.isfinite(norm):
        raise FloatingPointError(f"clip_global_norm: the norm of the gradients is {norm}; no weight was changed")
    return norm


def factor_for(norm: float, limit: float) -> float:
    """Return the factor that scales gradients of this norm to a norm of at most `limit`."""
    return min(1.0, limit / (norm + 1e-6))
