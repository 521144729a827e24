"""Optimizers that scale the step of each key by the ratio of two norms. A key is not cut, since a norm needs all of it.

A norm has the same bits every time (spaces/folded.py). On a GPU it stays there: it only goes into further arithmetic,
and `np.where` takes the place of an `if`.

Cost per update: LARS that of SGD, LAMB that of Adam, and two arrays read once more for their norms. Sources: LARS: You,
Gitman and Ginsburg, arXiv:1708.03888; correction of the momentum: Goyal et al., arXiv:1706.02677; in the form of MXNet
1.9, python/mxnet/optimizer/optimizer.py (LARS). LAMB: You et al., ICLR 2020 (arXiv:1904.00962); in the form of MXNet
1.9, src/operator/optimizer_op-inl.h (LambUpdatePhaseOneKernel, LambUpdatePhaseTwoKernel).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.adam import RunningMeans
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.declared import flag, number, texts
from mpikv.optimizers.step import Array, Arrays, Scalar, Step
from mpikv.spaces.folded import sum_of_squares


def norm(values: HostArray) -> Any:
    """Return the 2-norm of flat `values` in float64; of values on a GPU as an array there."""
    return np.sqrt(sum_of_squares(values))


class LARS(Optimizer):
    """SGD at the rate lr * eta * |w| / (|rescale_grad * grad| + wd * |w| + eps); at lr if either norm is 0.

    The norm is that of the gradient before clipping. With momentum_correction the momentum is multiplied by the ratio
    of this update's learning rate (before factors) to the last one's, so that a new rate scales old steps, too.

    >>> weight, optimizer = np.ones(1), optimizers.LARS(learning_rate=0.5, eta=0.5)
    >>> state = optimizer.update('w', weight, np.ones(1), optimizer.init(weight))
    >>> weight
    array([0.75])
    """

    momentum: float = number(default=0.0, low=0.0, doc="factor of the last step in the new one")
    lazy_update: bool = flag(default=True, doc="not used, accepted as in MXNet; row-sparse keys are refused")
    eta: float = number(default=0.001, low=0.0, doc="factor of the ratio of the norms")
    eps: float = number(default=0.0, low=0.0, doc="added to the denominator")
    momentum_correction: bool = flag(default=True, doc="whether a new rate scales the last step, too")
    skip: tuple[str, ...] = texts(
        default=("gamma", "beta", "bias"),
        doc="endings of the keys that are updated at lr, as biases and normalisation parameters should be",
    )
    states = (
        Array("momentum", "the last step", where="momentum"),
        Scalar("last_rate", "the last update's learning rate, 0 before the first", 0.0),
    )
    elementwise = False
    scratch = 1

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        momentum, last_rate, mom = self.momentum, step.state["last_rate"], arrays.get("momentum")
        if self.momentum_correction and last_rate:
            momentum *= step.global_rate / last_rate
        step.state["last_rate"] = step.global_rate
        rate = self._ratio(step, w, g) * step.learning_rate
        if mom is None:
            if step.wd:
                w *= (1.0 - rate * step.wd).astype(w.dtype)
            w -= self._scaled(step, w, g, tmp, rate)
            return
        mom *= step.real(momentum)
        if step.wd:
            mom -= np.multiply(w, (rate * step.wd).astype(w.dtype), out=tmp[0])
        mom -= self._scaled(step, w, g, tmp, rate)
        w += mom

    def _scaled(self, step: Step, w: HostArray, g: HostArray, tmp: list[HostArray], rate: Any) -> HostArray:
        """Return in tmp[0] what `prepared` does, scaled by a `rate` that may be on a GPU."""
        if self.clip_gradient is not None and self.clip_gradient > 0.0:
            g = self.prepared(step, w, g, tmp)
        else:
            rate = rate * self.rescale_grad
        scaled: HostArray = np.multiply(g, rate.astype(w.dtype), out=tmp[0])
        return scaled

    def _ratio(self, step: Step, w: HostArray, g: HostArray) -> Any:
        if isinstance(step.key, str) and step.key.endswith(self.skip):
            return np.float64(1.0)
        w_norm, g_norm = norm(w), norm(g) * abs(self.rescale_grad)
        ratio = w_norm * self.eta / (g_norm + w_norm * step.wd + self.eps)
        return np.where((w_norm > 0.0) & (g_norm > 0.0), ratio, 1.0)


class LAMB(RunningMeans):
    """g = clip(rescale_grad * grad); m and v are Adam's means;  s = m' / (sqrt(v') + epsilon) + wd * w;

    w = w - lr * r * s,  r = |w| / |s|, with |w| limited to lower_bound and upper_bound, and r = 1 if either norm is
    then 0. With bias_correction m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t), else m' = m and v' = v.

    >>> weight, optimizer = np.ones(1), optimizers.LAMB(learning_rate=0.5)
    >>> state = optimizer.update('w', weight, np.ones(1), optimizer.init(weight))
    >>> weight.round(3)
    array([0.5])
    """

    lower_bound: float | None = number(default=None, doc="|w| is taken as at least this; None or <= 0: no limit")
    upper_bound: float | None = number(default=None, doc="|w| is taken as at most this; None or <= 0: no limit")
    bias_correction: bool = flag(default=True, doc="whether the bias of the means is corrected")
    elementwise = False

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
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
