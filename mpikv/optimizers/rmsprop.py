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
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpikv.arrays import HostArray
from mpikv.optimizers.base import Common, Optimizer, Step
from mpikv.optimizers.fields import Field, flag, number

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RMSProp(Optimizer):
    """G = clip(rescale_grad * grad + wd * w);  n = gamma1 * n + (1 - gamma1) * G^2, and then

    not centered: w = w - lr * G / sqrt(n + epsilon);
    centered: g = gamma1 * g + (1 - gamma1) * G;  delta = gamma2 * delta - lr * G / sqrt(n - g^2 + epsilon);
    w = w + delta.

    clip_weights: the new w is limited to +- this; None or <= 0: not. gamma2 is used where `centered`.
    """

    default_learning_rate: ClassVar[float] = 0.001
    fields: ClassVar[Mapping[str, Field]] = {
        "gamma1": number(0.0, below=1.0),
        "gamma2": number(0.0, below=1.0),
        "epsilon": number(0.0),
        "centered": flag,
        "clip_weights": number(optional=True),
    }
    gamma1: float
    gamma2: float
    epsilon: float
    centered: bool
    clip_weights: float | None

    def __init__(
        self,
        learning_rate: float | None = None,
        *,
        gamma1: float = 0.9,
        gamma2: float = 0.9,
        epsilon: float = 1e-8,
        centered: bool = False,
        clip_weights: float | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(learning_rate=learning_rate, **common)
        self.gamma1 = gamma1
        self.gamma2 = gamma2
        self.epsilon = epsilon
        self.centered = centered
        self.clip_weights = clip_weights

    def state_names(self) -> tuple[str, ...]:
        """See `Optimizer`."""
        return ("n", "g", "delta") if self.centered else ("n",)

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
