"""LARS: SGD whose learning rate is scaled, key by key, to the ratio of the weight's norm to the gradient's.

It needs the norms of a key's whole value, so its keys are not cut.

Cost per update: that of SGD, and both arrays read once more for their norms. Source: You, Gitman and Ginsburg,
arXiv:1708.03888; correction of the momentum: Goyal et al., arXiv:1706.02677; in the form of MXNet 1.9,
python/mxnet/optimizer/optimizer.py (LARS).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.base import Array, Optimizer, Scalar
from mpikv.optimizers.fields import flag, number, texts
from mpikv.optimizers.norms import norm
from mpikv.optimizers.step import Step


class LARS(Optimizer):
    """SGD at the rate lr * eta * |w| / (|rescale_grad * grad| + wd * |w| + eps); at lr where either norm is 0.

    The norm is that of the gradient before clipping. With momentum_correction the momentum is multiplied by the ratio
    of this update's learning rate (before factors) to the last one's, so that a change of rate acts on old steps, too.

    >>> weight, optimizer = np.ones(1), optimizers.LARS(learning_rate=0.5, eta=0.5)
    >>> state = optimizer.update('w', weight, np.ones(1), optimizer.init(weight))
    >>> weight
    array([0.75])
    """

    momentum: float = number(default=0.0, low=0.0, doc="how much of the last step is made again")
    lazy_update: bool = flag(default=True, doc="taken for MXNet's sake; row-sparse keys are refused")
    eta: float = number(default=0.001, low=0.0, doc="factor of the ratio of the norms")
    eps: float = number(default=0.0, low=0.0, doc="added below the fraction")
    momentum_correction: bool = flag(default=True, doc="whether a change of the rate acts on the last step, too")
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

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        momentum, last_rate = self.momentum, step.state["last_rate"]
        if self.momentum_correction and last_rate:
            momentum *= step.global_rate / last_rate
        step.state["last_rate"] = step.global_rate
        real, mom = step.real, arrays.get("momentum")
        rate = self._ratio(step, w, g) * step.learning_rate
        if mom is None:
            if step.wd:
                w *= (1.0 - rate * step.wd).astype(w.dtype)
            w -= self._scaled(step, w, g, tmp, rate)
            return
        mom *= real(momentum)
        if step.wd:
            mom -= np.multiply(w, (rate * step.wd).astype(w.dtype), out=tmp[0])
        mom -= self._scaled(step, w, g, tmp, rate)
        w += mom

    def _scaled(self, step: Step, w: HostArray, g: HostArray, tmp: list[HostArray], rate: Any) -> HostArray:
        """The prepared gradient times `rate`, in tmp[0]: as `prepared` scales it, by a number that may be on a GPU."""
        if self.clip_gradient is not None and self.clip_gradient > 0.0:
            scaled: HostArray = np.multiply(self.prepared(step, w, g, tmp), rate.astype(w.dtype), out=tmp[0])
        else:
            scaled = np.multiply(g, (rate * self.rescale_grad).astype(w.dtype), out=tmp[0])
        return scaled

    def _ratio(self, step: Step, w: HostArray, g: HostArray) -> Any:
        if isinstance(step.key, str) and step.key.endswith(self.skip):
            return np.float64(1.0)
        w_norm, g_norm = norm(w), norm(g) * abs(self.rescale_grad)
        ratio = w_norm * self.eta / (g_norm + w_norm * step.wd + self.eps)
        return np.where((w_norm > 0.0) & (g_norm > 0.0), ratio, 1.0)
