"""Stochastic gradient descent: with momentum, with Nesterov's momentum, for late gradients, and by the gradient's sign.

All are from MXNet 1.9: SGD, NAG and Signum are the kernels of src/operator/optimizer_op-inl.h (SGDKernel, SGDMomKernel,
NAGMomKernel, SignSGDKernel, SignumKernel), DCASGD and Test the classes of python/mxnet/optimizer/optimizer.py. Weight
decay is added after clipping.

Cost per update: SGD, NAG and Signum 3 arrays read, 2 written; without momentum 2 and 1. DCASGD one more of each. Test 2
and 1. Sources: NAG: Nesterov, Soviet Math. Dokl. 27 (1983), in the form of Sutskever et al., ICML 2013. DCASGD: Zheng
et al., ICML 2017 (arXiv:1609.08326). Signum: Bernstein et al., signSGD, ICML 2018.
"""

from __future__ import annotations

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.declared import flag, number
from mpikv.optimizers.step import Array, Arrays, Step


class SGD(Optimizer):
    """mom = momentum * mom - lr * (g + wd * w);  w = w + mom.  Without momentum: w = w - lr * (g + wd * w).

    g = clip(rescale_grad * grad).

    >>> weight, optimizer = np.ones(1), optimizers.SGD(learning_rate=0.5)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1}, array([0.5]))
    """

    momentum: float = number(default=0.0, low=0.0, doc="factor of the last step in the new one")
    lazy_update: bool = flag(
        default=True, doc="only the pushed rows of a row-sparse key are updated; False: such keys are refused"
    )
    lazy = True
    states = (Array("momentum", "the last step", where="momentum"),)
    scratch = 1

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        real, rate, mom = step.real, step.learning_rate, arrays.get("momentum")
        if mom is None:
            descend(self, step, w, g, tmp)
            return
        mom *= real(self.momentum)
        if step.wd:
            mom -= np.multiply(w, real(rate * step.wd), out=tmp[0])
        mom -= self.prepared(step, w, g, tmp, scale=rate)
        w += mom


def descend(optimizer: Optimizer, step: Step, w: HostArray, g: HostArray, tmp: list[HostArray]) -> None:
    """Make SGD's update without momentum. Uses tmp[0]."""
    if step.wd:
        w *= step.real(1.0 - step.learning_rate * step.wd)
    w -= optimizer.prepared(step, w, g, tmp, scale=step.learning_rate)


class NAG(Optimizer):
    """mom = momentum * mom - lr * (g + wd * w);  w = w + momentum * mom - lr * (g + wd * w).

    g = clip(rescale_grad * grad). Without momentum it is SGD.

    >>> weight, optimizer = np.ones(1), optimizers.NAG(learning_rate=0.5, momentum=0.5)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1, 'momentum': array([-0.5])}, array([0.25]))
    """

    momentum: float = number(default=0.0, low=0.0, doc="factor of the last step in the new one")
    states = (Array("momentum", "the last step", where="momentum"),)

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        real, rate, mom = step.real, step.learning_rate, arrays.get("momentum")
        if mom is None:
            descend(self, step, w, g, tmp)
            return
        change = np.multiply(self.prepared(step, w, g, tmp), real(rate), out=tmp[0])
        if step.wd:
            change += np.multiply(w, real(rate * step.wd), out=tmp[1])
        mom *= real(self.momentum)
        mom -= change
        w -= change
        w += np.multiply(mom, real(self.momentum), out=tmp[0])


class DCASGD(Optimizer):
    """g = clip(rescale_grad * grad);  mom = momentum * mom - lr * (g + wd * w + lamda * g^2 * (w - previous));

    previous = w;  w = w + mom.

    Asynchronous SGD with delay compensation: a late gradient is corrected to first order. The weight has moved by
    w - previous since the last update; lamda * g^2 approximates the diagonal of the Hessian.

    >>> weight, optimizer = np.ones(1), optimizers.DCASGD(learning_rate=0.5)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1, 'previous': array([1.])}, array([0.5]))
    """

    momentum: float = number(default=0.0, low=0.0, doc="factor of the last step in the new one")
    lamda: float = number(default=0.04, low=0.0, doc="how much of the delay is compensated")
    states = (
        Array("previous", "the weight before the last update", from_weight=True),
        Array("momentum", "the last step", where="momentum"),
    )

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        real, previous, mom = step.real, arrays["previous"], arrays.get("momentum")
        g = self.prepared(step, w, g, tmp)
        change = np.subtract(w, previous, out=tmp[1])
        change *= g
        change *= g
        change *= real(self.lamda)
        change += g
        if step.wd:
            change += np.multiply(w, real(step.wd), out=tmp[0])
        change *= real(step.learning_rate)
        np.copyto(previous, w)
        if mom is None:
            w -= change
        else:
            mom *= real(self.momentum)
            mom -= change
            w += mom


class Signum(Optimizer):
    """g = clip(rescale_grad * grad) + wd * w;  mom = momentum * mom - (1 - momentum) * g;

    w = (1 - lr * wd_lh) * w + lr * sign(mom).
    Without momentum: w = (1 - lr * (wd + wd_lh)) * w - lr * sign(rescale_grad * grad).

    >>> weight, optimizer = np.ones(1), optimizers.Signum(learning_rate=0.5, momentum=0.0)
    >>> optimizer.update('w', weight, np.array([7.0]), optimizer.init(weight)), weight
    ({'t': 1}, array([0.5]))
    """

    learning_rate: float = number(default=0.01, low=0.0, kw_only=False, doc="the rate of an update")
    momentum: float = number(default=0.9, low=0.0, below=1.0, doc="weight of the old mean in the new one")
    wd_lh: float = number(default=0.0, low=0.0, doc="weight decay outside of the sign (Loshchilov and Hutter)")
    states = (Array("momentum", "running mean of gradients, with the sign of the step", where="momentum"),)

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        real, rate, mom, decay = step.real, step.learning_rate, arrays.get("momentum"), self.wd_lh
        if mom is None:
            direction = np.sign(self.prepared(step, w, g, tmp), out=tmp[0])
            np.negative(direction, out=direction)
            decay += step.wd
        else:
            mom *= real(self.momentum)
            if step.wd:
                mom -= np.multiply(w, real((1.0 - self.momentum) * step.wd), out=tmp[0])
            mom -= self.prepared(step, w, g, tmp, scale=1.0 - self.momentum)
            direction = np.sign(mom, out=tmp[0])
        if decay:
            w *= real(1.0 - rate * decay)
        direction *= real(rate)
        w += direction


class Test(Optimizer):
    """w = w + rescale_grad * grad, for tests. The other common parameters are accepted and not used.

    >>> weight, optimizer = np.ones(1), optimizers.Test(rescale_grad=0.5)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1}, array([1.5]))
    """

    lazy = True
    scratch = 1
    __test__ = False  # pytest would take the name for a test class

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        w += g if self.rescale_grad == 1.0 else np.multiply(g, step.real(self.rescale_grad), out=tmp[0])
