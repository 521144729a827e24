"""LAMB: Adam's step, scaled key by key to the ratio of the weight's norm to the step's.

It needs the norms of a key's whole value, so its keys are not cut.

Cost per update: that of Adam, and the weight and the step read once more for their norms.
Source: You et al., ICLR 2020 (arXiv:1904.00962); in the form of MXNet 1.9, src/operator/optimizer_op-inl.h
(LambUpdatePhaseOneKernel, LambUpdatePhaseTwoKernel).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.adam import RunningMeans
from mpikv.optimizers.fields import flag, number
from mpikv.optimizers.norms import norm
from mpikv.optimizers.step import Step


class LAMB(RunningMeans):
    """g = clip(rescale_grad * grad); m and v are Adam's means;  s = m' / (sqrt(v') + epsilon) + wd * w;

    w = w - lr * r * s,  r = |w| / |s|, with |w| limited to lower_bound and upper_bound, and r = 1 where either norm is
    then 0. With bias_correction m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t), else m and v themselves.

    >>> weight, optimizer = np.ones(1), optimizers.LAMB(learning_rate=0.5)
    >>> state = optimizer.update('w', weight, np.ones(1), optimizer.init(weight))
    >>> weight.round(3)
    array([0.5])
    """

    lower_bound: float | None = number(default=None, doc="|w| counts as at least this; None or <= 0: as it is")
    upper_bound: float | None = number(default=None, doc="|w| counts as at most this; None or <= 0: as it is")
    bias_correction: bool = flag(default=True, doc="whether the bias of the means is corrected")
    elementwise = False

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        real = step.real
        self.update_means(step, self.prepared(step, w, g, tmp), arrays, tmp[1])
        change, root = tmp
        np.sqrt(arrays["var"], out=root)
        if self.bias_correction:
            root *= real(1.0 / math.sqrt(1.0 - self.beta2**step.t))
        root += real(self.epsilon)
        np.divide(arrays["mean"], root, out=change)
        if self.bias_correction:
            change *= real(1.0 / (1.0 - self.beta1**step.t))
        if step.wd:
            change += np.multiply(w, real(step.wd), out=root)
        w_norm, step_norm = self._limited(norm(w)), norm(change)
        ratio = np.where((w_norm > 0.0) & (step_norm > 0.0), w_norm / step_norm, 1.0)
        change *= (ratio * step.learning_rate).astype(w.dtype)
        w -= change

    def _limited(self, w_norm: Any) -> Any:
        if self.lower_bound is not None and self.lower_bound > 0.0:
            w_norm = np.maximum(w_norm, self.lower_bound)
        if self.upper_bound is not None and self.upper_bound > 0.0:
            w_norm = np.minimum(w_norm, self.upper_bound)
        return w_norm
