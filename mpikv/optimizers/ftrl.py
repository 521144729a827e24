"""FTRL-proximal: weights that a small sum of gradients cannot move stay exactly zero.

State: z, from which each update computes the weight anew, and n, the sum of squared gradients.
Cost per update: 4 arrays read, 3 written.
Source: McMahan et al., Ad Click Prediction, KDD 2013, algorithm 1; in the form of MXNet 1.9,
src/operator/optimizer_op-inl.h (FtrlUpdateKernel).
"""

from __future__ import annotations

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.checks import shown
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.declared import number
from mpikv.optimizers.step import Array, Arrays, Step


class Ftrl(Optimizer):
    """g = clip(rescale_grad * grad);  z = z + g - (sqrt(n + g^2) - sqrt(n)) * w / lr;  n = n + g^2;

    w = (sign(z) * lamda1 - z) / ((beta + sqrt(n)) / lr + wd) if |z| > lamda1, else 0.

    An update with a learning rate of 0, also by a schedule or `lr_mult`, raises ValueError: the formula divides by it.

    >>> weight, optimizer = np.ones(1), optimizers.Ftrl(lamda1=5.0)
    >>> state = optimizer.update('w', weight, np.zeros(1), optimizer.init(weight))
    >>> weight  # no sum of gradients has moved it
    array([0.])
    """

    learning_rate = 0.1
    lamda1: float = number(default=0.01, low=0.0, doc="sums of gradients up to this leave a weight at zero")
    beta: float = number(default=1.0, low=0.0, doc="added to the root of n")
    lazy = True
    states = (Array("z", "the sum from which the weight is computed"), Array("n", "the sum of squared gradients"))
    scratch = 3

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        real, rate, z, n = step.real, step.learning_rate, arrays["z"], arrays["n"]
        if rate == 0.0:
            raise ValueError(f"ftrl: update {step.t} of key {shown(step.key)} has learning rate 0, which it divides by")
        g = self.prepared(step, w, g, tmp)
        old_root = np.sqrt(n, out=tmp[1])
        n += np.multiply(g, g, out=tmp[2])
        z += g
        root = np.sqrt(n, out=tmp[2])
        sigma = np.subtract(root, old_root, out=tmp[1])
        sigma *= real(1.0 / rate)
        sigma *= w
        z -= sigma
        divisor = root
        divisor += real(self.beta)
        divisor *= real(1.0 / rate)
        divisor += real(step.wd)
        # sign(z) * lamda1 - z if |z| > lamda1, else 0, is z limited to +- lamda1, minus z.
        np.maximum(z, real(-self.lamda1), out=w)
        np.minimum(w, real(self.lamda1), out=w)
        w -= z
        w /= divisor
