"""RMSProp: the step is divided by the root of a running mean of squared gradients ("n").

With `centered` the running mean of gradients ("g") is taken off, so that their variance stands below the fraction, and
the steps are carried on with a momentum ("delta").

Cost per update: 3 arrays read and 2 written; centered: 5 and 4.
Source: Tieleman and Hinton, Coursera lecture 6.5 (2012); centered: Graves, arXiv:1308.0850, equations 38 to 45; in the
form of MXNet 1.9, src/operator/optimizer_op-inl.h (RMSPropUpdateKernel, RMSPropAlexUpdateKernel): epsilon inside the
root, weight decay added before clipping. Differs: where rounding makes the variance n - g^2 negative it counts as 0, so
that no root of a negative number is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.base import Array, Optimizer
from mpikv.optimizers.fields import flag, number
from mpikv.optimizers.step import Step


class RMSProp(Optimizer):
    """G = clip(rescale_grad * grad + wd * w);  n = gamma1 * n + (1 - gamma1) * G^2, and then

    not centered: w = w - lr * G / sqrt(n + epsilon);
    centered: g = gamma1 * g + (1 - gamma1) * G;  delta = gamma2 * delta - lr * G / sqrt(n - g^2 + epsilon);
    w = w + delta.

    >>> weight, optimizer = np.ones(1), optimizers.RMSProp(learning_rate=0.5, gamma1=0.0, epsilon=0.0)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1, 'n': array([1.])}, array([0.5]))
    """

    joins = True
    learning_rate: float = number(default=0.001, low=0.0, kw_only=False, doc="the rate of an update")
    gamma1: float = number(default=0.9, low=0.0, below=1.0, doc="how much of the old means stays")
    gamma2: float = number(default=0.9, low=0.0, below=1.0, doc="centered: how much of the last step is made again")
    epsilon: float = number(default=1e-8, low=0.0, doc="added before the root is taken")
    centered: bool = flag(default=False, doc="whether the running mean is taken off")
    clip_weights: float | None = number(default=None, doc="the new w is limited to +- this; None or <= 0: not")
    states = (
        Array("n", "running mean of squared gradients"),
        Array("g", "running mean of gradients", where="centered"),
        Array("delta", "the last step", where="centered"),
    )

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        real, n = step.real, arrays["n"]
        g = self.prepared(step, w, g, tmp, decay=True)
        n *= real(self.gamma1)
        square = np.multiply(g, g, out=tmp[1])
        square *= real(1.0 - self.gamma1)
        n += square
        if self.centered:
            mean, delta = arrays["g"], arrays["delta"]
            mean *= real(self.gamma1)
            mean += np.multiply(g, real(1.0 - self.gamma1), out=tmp[1])
            below = np.multiply(mean, mean, out=tmp[1])
            np.subtract(n, below, out=below)
            np.maximum(below, real(0.0), out=below)
            below += real(self.epsilon)
        else:
            below = np.add(n, real(self.epsilon), out=tmp[1])
        np.sqrt(below, out=below)
        change = np.divide(g, below, out=tmp[0])
        change *= real(step.learning_rate)
        if self.centered:
            delta *= real(self.gamma2)
            delta -= change
            w += delta
        else:
            w -= change
        bound = self.clip_weights
        if bound is not None and bound > 0.0:
            np.maximum(w, real(-bound), out=w)
            np.minimum(w, real(bound), out=w)
