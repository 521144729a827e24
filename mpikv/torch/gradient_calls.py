"""The exchange of gradients by a call on tensors, in `step`: for compression objects of the program's own.

Workers first tell each other which gradients they have; a worker without one that others have adds zero.

Cost per round: a small exchange, and one of all gradients, which are copied in and out.
"""

from __future__ import annotations

import numpy as np
import torch

from mpikv.torch.compression import Compressor
from mpikv.torch.gradients import Gradients
from mpikv.torch.tensor_calls import Allreduce


class GradientCalls:
    """In place of `gradients`, for an optimizer. op: 'mean' or 'sum'."""

    def __init__(self, gradients: Gradients, op: str, compression: Compressor) -> None:
        self.calls, self.forms, self.parameters = gradients.calls, gradients.forms, gradients.parameters
        self.steps = gradients.steps
        self._compression, self._call = compression, Allreduce(self.calls, "gradients", op)
        self.fired: dict[int, None] = {}

    def note(self, i: int) -> None:
        """Do nothing: a gradient counts when it is ready."""

    def ready(self, i: int) -> None:
        """Note that the gradient of parameter i is complete for this round. Local."""
        self.fired[i] = None

    def finish(self) -> None:
        """Exchange the gradients of this round. Collective, blocks."""
        used = np.zeros(len(self.parameters), np.int8)
        used[list(self.fired)] = 1
        (used,) = self.calls.allreduce([used], "max", "which gradients there are")
        chosen = [self.parameters[i] for i in np.flatnonzero(used)]
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in chosen]
        sent = [self._compression.compress(grad.detach()) for grad in grads]
        results = self._call.make([one for one, _ in sent])
        for parameter, result, (_, ctx) in zip(chosen, results, sent, strict=True):
            parameter.grad = self._compression.decompress(result, ctx)
        self.fired.clear()
