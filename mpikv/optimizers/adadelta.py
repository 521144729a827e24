"""AdaDelta: the size of a step comes from the sizes of earlier steps, not from a learning rate.

State: running means of squared gradients ("acc_grad") and of squared steps ("acc_delta").
Cost per update: 4 arrays read, 3 written.
Source: Zeiler, arXiv:1212.5701; in the form of MXNet 1.9, python/mxnet/optimizer/optimizer.py (AdaDelta).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.base import Array, Optimizer
from mpikv.optimizers.fields import number
from mpikv.optimizers.step import Step


class AdaDelta(Optimizer):
    """g = clip(rescale_grad * grad);  acc_grad = rho * acc_grad + (1 - rho) * g^2;

    d = sqrt(acc_delta + epsilon) / sqrt(acc_grad + epsilon) * g;  acc_delta = rho * acc_delta + (1 - rho) * d^2;
    w = w - (d + wd * w).

    As in MXNet 1.9 the learning rate, its schedule and `lr_mult` have no part in it.

    >>> weight, optimizer = np.ones(1), optimizers.AdaDelta(wd=0.5)
    >>> state = optimizer.update('w', weight, np.zeros(1), optimizer.init(weight))
    >>> weight, sorted(state)
    (array([0.5]), ['acc_delta', 'acc_grad', 't'])
    """

    joins = True
    rho: float = number(default=0.9, low=0.0, below=1.0, doc="how much of the old means stays")
    epsilon: float = number(default=1e-5, low=0.0, doc="added to both means before their roots are taken")
    states = (
        Array("acc_grad", "running mean of squared gradients"),
        Array("acc_delta", "running mean of squared steps"),
    )

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        real, acc_grad, acc_delta = step.real, arrays["acc_grad"], arrays["acc_delta"]
        delta, other = tmp
        g = self.prepared(step, w, g, tmp)
        self._add_square(step, acc_grad, g, other)
        np.multiply(g, np.sqrt(np.add(acc_delta, real(self.epsilon), out=other), out=other), out=delta)
        delta /= np.sqrt(np.add(acc_grad, real(self.epsilon), out=other), out=other)
        self._add_square(step, acc_delta, delta, other)
        if step.wd:
            delta += np.multiply(w, real(step.wd), out=other)
        w -= delta

    def _add_square(self, step: Step, mean: HostArray, values: HostArray, tmp: HostArray) -> None:
        mean *= step.real(self.rho)
        square = np.multiply(values, values, out=tmp)
        square *= step.real(1.0 - self.rho)
        mean += square
