"""Stochastic gradient descent: with momentum, and with Nesterov's momentum.

Both use g = clip(rescale_grad * grad); weight decay is added after clipping.

Cost per update: 2 or 3 arrays read, 1 or 2 written (momentum is one array). Source: MXNet 1.9,
src/operator/optimizer_op-inl.h (SGDKernel, SGDMomKernel, NAGMomKernel); Nesterov, Soviet Math. Dokl. 27 (1983), in the
form of Sutskever et al., ICML 2013.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.base import Array, Optimizer
from mpikv.optimizers.fields import flag, number
from mpikv.optimizers.step import Step


class SGD(Optimizer):
    """mom = momentum * mom - lr * (g + wd * w);  w = w + mom.  Without momentum: w = w - lr * (g + wd * w).

    >>> weight, optimizer = np.ones(1), optimizers.SGD(learning_rate=0.5)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1}, array([0.5]))
    """

    joins = True
    momentum: float = number(default=0.0, low=0.0, doc="how much of the last step is made again")
    lazy_update: bool = flag(
        default=True, doc="of a row-sparse key, the pushed rows alone are updated; False: such keys are refused"
    )
    lazy = True
    states = (Array("momentum", "the last step", where="momentum"),)
    scratch = 1

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        momentum_step(self, step, w, g, tmp, mom=arrays.get("momentum"), momentum=self.momentum)


def momentum_step(
    optimizer: Optimizer,
    step: Step,
    w: HostArray,
    g: HostArray,
    tmp: list[HostArray],
    *,
    mom: HostArray | None,
    momentum: float,
) -> None:
    """The update of SGD, without momentum where `mom` is None. Uses tmp[0]."""
    real, rate = step.real, step.learning_rate
    if mom is None:
        if step.wd:
            w *= real(1.0 - rate * step.wd)
        w -= optimizer.prepared(step, w, g, tmp, scale=rate)
        return
    mom *= real(momentum)
    if step.wd:
        mom -= np.multiply(w, real(rate * step.wd), out=tmp[0])
    mom -= optimizer.prepared(step, w, g, tmp, scale=rate)
    w += mom


class NAG(Optimizer):
    """mom = momentum * mom - lr * (g + wd * w);  w = w + momentum * mom - lr * (g + wd * w).

    Without momentum it is SGD.

    >>> weight, optimizer = np.ones(1), optimizers.NAG(learning_rate=0.5, momentum=0.5)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1, 'momentum': array([-0.5])}, array([0.25]))
    """

    joins = True
    momentum: float = number(default=0.0, low=0.0, doc="how much of the last step is made again")
    states = (Array("momentum", "the last step", where="momentum"),)

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        mom = arrays.get("momentum")
        if mom is None:
            momentum_step(self, step, w, g, tmp, mom=None, momentum=0.0)
            return
        real = step.real
        change = np.multiply(self.prepared(step, w, g, tmp), real(step.learning_rate), out=tmp[0])
        if step.wd:
            change += np.multiply(w, real(step.learning_rate * step.wd), out=tmp[1])
        mom *= real(self.momentum)
        mom -= change
        w -= change
        w += np.multiply(mom, real(self.momentum), out=tmp[0])
