"""Adam, and Adam with decoupled weight decay.

Both keep m, the mean of gradients ("mean"), and v, the mean of their squares ("var"). The correction of the means'
bias is folded into the learning rate, lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t), so that epsilon is added to
the uncorrected sqrt(v).

Cost per update: 4 arrays read, 3 written.
Source: Kingma and Ba, ICLR 2015, end of section 2; Loshchilov and Hutter, ICLR 2019; in the form of MXNet 1.9,
src/operator/optimizer_op-inl.h (AdamUpdateKernel), and, for AdamW, of MXNet 2.0, python/mxnet/optimizer/adamW.py.
"""

from __future__ import annotations

import math

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.declared import flag, number
from mpikv.optimizers.step import Array, Arrays, Step, update_mean


class RunningMeans(Optimizer):
    """The base of optimizers that keep m and v."""

    learning_rate: float = number(default=0.001, low=0.0, kw_only=False, doc="the rate of an update")
    beta1: float = number(default=0.9, low=0.0, below=1.0, doc="weight of the old m in the new one")
    beta2: float = number(default=0.999, low=0.0, below=1.0, doc="weight of the old v in the new one")
    epsilon: float = number(default=1e-6, low=0.0, doc="added to the root of v")
    states = (Array("mean", "m, the running mean of gradients"), Array("var", "v, the running mean of their squares"))

    def update_means(self, step: Step, g: HostArray, arrays: Arrays, tmp: HostArray) -> None:
        """Update m = beta1 * m + (1 - beta1) * g and v = beta2 * v + (1 - beta2) * g^2. tmp: scratch that is not `g`.

        Example: see `corrected`.
        """
        update_mean(step, arrays["mean"], g, self.beta1, tmp)
        update_mean(step, arrays["var"], g, self.beta2, tmp, squared=True)

    def corrected(self, step: Step) -> float:
        """Return the learning rate lr_t.

        >>> step = optimizers.Step('w', 1, 0.5, 0.0, 0.5, real=np.float64, shape=(1,), state={})
        >>> optimizer, means = optimizers.Adam(beta1=0.75, beta2=0.75), {'mean': np.zeros(1), 'var': np.zeros(1)}
        >>> optimizer.update_means(step, np.ones(1), means, np.empty(1))
        >>> means['mean'], optimizer.corrected(step)
        (array([0.25]), 1.0)
        """
        return step.learning_rate * math.sqrt(1.0 - self.beta2**step.t) / (1.0 - self.beta1**step.t)


class Adam(RunningMeans):
    """g = clip(rescale_grad * grad + wd * w);  w = w - lr_t * m / (sqrt(v) + epsilon).

    >>> weight, optimizer = np.ones(1), optimizers.Adam(learning_rate=0.5)
    >>> state = optimizer.update('w', weight, np.ones(1), optimizer.init(weight))
    >>> weight.round(3), sorted(state)
    (array([0.5]), ['mean', 't', 'var'])
    """

    epsilon = 1e-8
    lazy_update: bool = flag(
        default=True, doc="only the pushed rows of a row-sparse key are updated; False: such keys are refused"
    )
    lazy = True

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        g = self.prepared(step, w, g, tmp, decay=True)
        self.update_means(step, g, arrays, tmp[1])
        root = np.sqrt(arrays["var"], out=tmp[1])
        root += step.real(self.epsilon)
        change = np.divide(arrays["mean"], root, out=tmp[0])
        change *= step.real(self.corrected(step))
        w -= change


class AdamW(RunningMeans):
    """MXNet's AdamW, not PyTorch's: the decay is scaled by lr_t, not lr, and the defaults differ (wd 0, not 0.01).

    g = clip(rescale_grad * grad);  w = w - lr_t * (m / (sqrt(v) + epsilon) + wd * w).

    With correct_bias=False lr_t = lr. PyTorch's adds its eps, by default 1e-8, to the corrected root. `create` and
    Trainer accept PyTorch's class, too: `Trainer(net, torch.optim.AdamW, {"lr": 1e-3})`.

    >>> weight, optimizer = np.ones(1), optimizers.AdamW(learning_rate=0.5, wd=0.5, correct_bias=False)
    >>> state = optimizer.update('w', weight, np.zeros(1), optimizer.init(weight))
    >>> weight
    array([0.75])
    """

    correct_bias: bool = flag(default=True, doc="whether the bias of the means is corrected")

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        real = step.real
        self.update_means(step, self.prepared(step, w, g, tmp), arrays, tmp[1])
        root = np.sqrt(arrays["var"], out=tmp[1])
        root += real(self.epsilon)
        change = np.divide(arrays["mean"], root, out=tmp[0])
        if step.wd:
            change += np.multiply(w, real(step.wd), out=tmp[1])
        change *= real(self.corrected(step) if self.correct_bias else step.learning_rate)
        w -= change
