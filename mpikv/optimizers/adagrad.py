"""Optimizers that divide the rate by the root of the sum, or of a running mean, of squared gradients.

All are in the form of MXNet 1.9: AdaGrad and AdaDelta of python/mxnet/optimizer/optimizer.py, RMSProp of
src/operator/optimizer_op-inl.h (RMSPropUpdateKernel, RMSPropAlexUpdateKernel).

Cost per update: AdaGrad 3 arrays read, 2 written; AdaDelta 4 and 3; RMSProp 3 and 2, centered 5 and 4. Sources:
AdaGrad: Duchi, Hazan and Singer, J. Mach. Learn. Res. 12 (2011). AdaDelta: Zeiler, arXiv:1212.5701. RMSProp: Tieleman
and Hinton, Coursera lecture 6.5 (2012); centered: Graves, arXiv:1308.0850, equations 38 to 45.
"""

from __future__ import annotations

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.declared import flag, number
from mpikv.optimizers.step import Array, Arrays, Step, limit, update_mean


class AdaGrad(Optimizer):
    """g = clip(rescale_grad * grad);  h = h + g^2;  w = w - lr * (g / sqrt(h + eps) + wd * w).

    >>> weight, optimizer = np.ones(1), optimizers.AdaGrad(learning_rate=0.5, eps=0.0)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1, 'history': array([1.])}, array([0.5]))
    """

    eps: float = number(default=1e-7, low=0.0, doc="added to h before its root is taken")
    lazy = True
    states = (Array("history", "h, the sum of squared gradients"),)

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        real, history = step.real, arrays["history"]
        g = self.prepared(step, w, g, tmp)
        history += np.multiply(g, g, out=tmp[1])
        root = np.add(history, real(self.eps), out=tmp[1])
        change = np.divide(g, np.sqrt(root, out=root), out=tmp[0])
        if step.wd:
            change += np.multiply(w, real(step.wd), out=tmp[1])
        change *= real(step.learning_rate)
        w -= change


class AdaDelta(Optimizer):
    """g = clip(rescale_grad * grad);  acc_grad = rho * acc_grad + (1 - rho) * g^2;

    d = sqrt(acc_delta + epsilon) / sqrt(acc_grad + epsilon) * g;  acc_delta = rho * acc_delta + (1 - rho) * d^2;
    w = w - (d + wd * w).

    As in MXNet 1.9 the learning rate, its schedule and `lr_mult` are not used.

    >>> weight, optimizer = np.ones(1), optimizers.AdaDelta(wd=0.5)
    >>> state = optimizer.update('w', weight, np.zeros(1), optimizer.init(weight))
    >>> weight, sorted(state)
    (array([0.5]), ['acc_delta', 'acc_grad', 't'])
    """

    rho: float = number(default=0.9, low=0.0, below=1.0, doc="weight of the old value in both running means")
    epsilon: float = number(default=1e-5, low=0.0, doc="added to both means before their roots are taken")
    states = (
        Array("acc_grad", "running mean of squared gradients"),
        Array("acc_delta", "running mean of squared steps"),
    )

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        epsilon, acc_grad, acc_delta = step.real(self.epsilon), arrays["acc_grad"], arrays["acc_delta"]
        delta, other = tmp
        g = self.prepared(step, w, g, tmp)
        update_mean(step, acc_grad, g, self.rho, other, squared=True)
        np.multiply(g, np.sqrt(np.add(acc_delta, epsilon, out=other), out=other), out=delta)
        delta /= np.sqrt(np.add(acc_grad, epsilon, out=other), out=other)
        update_mean(step, acc_delta, delta, self.rho, other, squared=True)
        if step.wd:
            delta += np.multiply(w, step.real(step.wd), out=other)
        w -= delta


class RMSProp(Optimizer):
    """G = clip(rescale_grad * grad + wd * w);  n = gamma1 * n + (1 - gamma1) * G^2, and then

    not centered: w = w - lr * G / sqrt(n + epsilon);
    centered: g = gamma1 * g + (1 - gamma1) * G;  delta = gamma2 * delta - lr * G / sqrt(n - g^2 + epsilon);
    w = w + delta.

    Differs from MXNet's: a variance n - g^2 that rounding has made negative is taken as 0, since a negative number has
    no root.

    >>> weight, optimizer = np.ones(1), optimizers.RMSProp(learning_rate=0.5, gamma1=0.0, epsilon=0.0)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1, 'n': array([1.])}, array([0.5]))
    """

    learning_rate: float = number(default=0.001, low=0.0, kw_only=False, doc="the rate of an update")
    gamma1: float = number(default=0.9, low=0.0, below=1.0, doc="weight of the old value in the running means")
    gamma2: float = number(default=0.9, low=0.0, below=1.0, doc="centered: factor of the last step in the new one")
    epsilon: float = number(default=1e-8, low=0.0, doc="added before the root is taken")
    centered: bool = flag(default=False, doc="whether the square of the gradients' running mean is subtracted from n")
    clip_weights: float | None = number(default=None, doc="the new w is limited to +- this; None or <= 0: not")
    states = (
        Array("n", "running mean of squared gradients"),
        Array("g", "running mean of gradients", where="centered"),
        Array("delta", "the last step", where="centered"),
    )

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        real, n, delta = step.real, arrays["n"], arrays.get("delta")
        g = self.prepared(step, w, g, tmp, decay=True)
        update_mean(step, n, g, self.gamma1, tmp[1], squared=True)
        variance = n
        if delta is not None:
            mean = arrays["g"]
            update_mean(step, mean, g, self.gamma1, tmp[1])
            variance = np.subtract(n, np.multiply(mean, mean, out=tmp[1]), out=tmp[1])
            np.maximum(variance, real(0.0), out=variance)
        variance = np.add(variance, real(self.epsilon), out=tmp[1])
        change = np.divide(g, np.sqrt(variance, out=variance), out=tmp[0])
        change *= real(step.learning_rate)
        if delta is None:
            w -= change
        else:
            delta *= real(self.gamma2)
            delta -= change
            w += delta
        limit(w, self.clip_weights, real)
