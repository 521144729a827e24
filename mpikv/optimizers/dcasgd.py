"""Asynchronous SGD with delay compensation: a gradient that comes late is corrected to first order.

The weight moved by (w - previous) since the last update; lamda * g^2 stands for the diagonal of the Hessian. State: the
weight before the last update ("previous"), and "momentum" where there is one. Cost per update: 3 arrays read, 2
written, one of each more with momentum. Source: Zheng et al., ICML 2017 (arXiv:1609.08326); in the form of MXNet 1.9,
python/mxnet/optimizer/optimizer.py (DCASGD).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.base import Array, Optimizer
from mpikv.optimizers.fields import number
from mpikv.optimizers.step import Step


class DCASGD(Optimizer):
    """g = clip(rescale_grad * grad);  mom = momentum * mom - lr * (g + wd * w + lamda * g^2 * (w - previous));

    previous = w;  w = w + mom.

    >>> weight, optimizer = np.ones(1), optimizers.DCASGD(learning_rate=0.5)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1, 'previous': array([1.])}, array([0.5]))
    """

    joins = True
    momentum: float = number(default=0.0, low=0.0, doc="how much of the last step is made again")
    lamda: float = number(default=0.04, low=0.0, doc="how much of the delay is compensated")
    states = (
        Array("previous", "the weight before the last update", from_weight=True),
        Array("momentum", "the last step", where="momentum"),
    )

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        real, rate, previous, mom = step.real, step.learning_rate, arrays["previous"], arrays.get("momentum")
        g = self.prepared(step, w, g, tmp)
        change = np.subtract(w, previous, out=tmp[1])
        change *= g
        change *= g
        change *= real(self.lamda)
        change += g
        if step.wd:
            change += np.multiply(w, real(step.wd), out=tmp[0])
        change *= real(rate)
        np.copyto(previous, w)
        if mom is None:
            w -= change
        else:
            mom *= real(self.momentum)
            mom -= change
            w += mom
