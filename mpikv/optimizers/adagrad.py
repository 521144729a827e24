"""AdaGrad: each element's rate falls with the sum of its squared gradients ("history").

Cost per update: 3 arrays read, 2 written.
Source: Duchi, Hazan and Singer, J. Mach. Learn. Res. 12 (2011); in the form of MXNet 1.9,
python/mxnet/optimizer/optimizer.py (AdaGrad): eps inside the root, weight decay outside the fraction.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.base import Array, Optimizer
from mpikv.optimizers.fields import number
from mpikv.optimizers.step import Step


class AdaGrad(Optimizer):
    """g = clip(rescale_grad * grad);  h = h + g^2;  w = w - lr * (g / sqrt(h + eps) + wd * w).

    >>> weight, optimizer = np.ones(1), optimizers.AdaGrad(learning_rate=0.5, eps=0.0)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1, 'history': array([1.])}, array([0.5]))
    """

    joins = True
    eps: float = number(default=1e-7, low=0.0, doc="added to h before its root is taken")
    lazy = True
    states = (Array("history", "h, the sum of squared gradients"),)

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        real, history = step.real, arrays["history"]
        g = self.prepared(step, w, g, tmp)
        history += np.multiply(g, g, out=tmp[1])
        root = np.add(history, real(self.eps), out=tmp[1])
        np.sqrt(root, out=root)
        change = np.divide(g, root, out=tmp[0])
        if step.wd:
            change += np.multiply(w, real(step.wd), out=tmp[1])
        change *= real(step.learning_rate)
        w -= change
