"""Signum: steps of one size, in the direction of the sign of the gradient or of its running mean.

Cost per update: 3 arrays read, 2 written; without momentum 2 and 1.
Source: Bernstein et al., signSGD, ICML 2018; in the form of MXNet 1.9, src/operator/optimizer_op-inl.h (SignSGDKernel,
SignumKernel).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.base import Array, Optimizer
from mpikv.optimizers.fields import number
from mpikv.optimizers.step import Step


class Signum(Optimizer):
    """g = clip(rescale_grad * grad) + wd * w;  mom = momentum * mom - (1 - momentum) * g;

    w = (1 - lr * wd_lh) * w + lr * sign(mom).
    Without momentum: w = (1 - lr * (wd + wd_lh)) * w - lr * sign(rescale_grad * grad).

    >>> weight, optimizer = np.ones(1), optimizers.Signum(learning_rate=0.5, momentum=0.0)
    >>> optimizer.update('w', weight, np.array([7.0]), optimizer.init(weight)), weight
    ({'t': 1}, array([0.5]))
    """

    joins = True
    learning_rate: float = number(default=0.01, low=0.0, kw_only=False, doc="the rate of an update")
    momentum: float = number(default=0.9, low=0.0, below=1.0, doc="how much of the old mean stays")
    wd_lh: float = number(default=0.0, low=0.0, doc="weight decay outside of the sign (Loshchilov and Hutter)")
    states = (Array("momentum", "running mean of gradients, with the sign of the step", where="momentum"),)

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        real, rate, mom = step.real, step.learning_rate, arrays.get("momentum")
        if mom is None:
            direction = np.sign(self.prepared(step, w, g, tmp), out=tmp[0])
            np.negative(direction, out=direction)
            decay = step.wd + self.wd_lh
        else:
            mom *= real(self.momentum)
            if step.wd:
                mom -= np.multiply(w, real((1.0 - self.momentum) * step.wd), out=tmp[0])
            mom -= self.prepared(step, w, g, tmp, scale=1.0 - self.momentum)
            direction = np.sign(mom, out=tmp[0])
            decay = self.wd_lh
        if decay:
            w *= real(1.0 - rate * decay)
        direction *= real(rate)
        w += direction
