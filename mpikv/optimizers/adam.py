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
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpikv.arrays import HostArray
from mpikv.optimizers.base import Common, Optimizer, Step
from mpikv.optimizers.fields import Field, flag, number

if TYPE_CHECKING:
    from typing_extensions import Unpack


def update_means(
    step: Step, g: HostArray, arrays: Mapping[str, HostArray], tmp: HostArray, *, beta1: float, beta2: float
) -> None:
    """m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2. tmp: scratch that is not `g`."""
    real, mean, var = step.real, arrays["mean"], arrays["var"]
    mean *= real(beta1)
    mean += np.multiply(g, real(1.0 - beta1), out=tmp)
    var *= real(beta2)
    square = np.multiply(g, g, out=tmp)
    square *= real(1.0 - beta2)
    var += square


def _corrected(rate: float, t: int, beta1: float, beta2: float) -> float:
    return rate * math.sqrt(1.0 - beta2**t) / (1.0 - beta1**t)


class Adam(Optimizer):
    """g = clip(rescale_grad * grad + wd * w);  w = w - lr_t * m / (sqrt(v) + epsilon).

    lazy_update: taken for MXNet's sake; it concerns row-sparse gradients, and there are none here.
    """

    default_learning_rate: ClassVar[float] = 0.001
    fields: ClassVar[Mapping[str, Field]] = {
        "beta1": number(0.0, below=1.0),
        "beta2": number(0.0, below=1.0),
        "epsilon": number(0.0),
        "lazy_update": flag,
    }
    beta1: float
    beta2: float
    epsilon: float
    lazy_update: bool

    def __init__(
        self,
        learning_rate: float | None = None,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        lazy_update: bool = True,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(learning_rate=learning_rate, **common)
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self.lazy_update = lazy_update

    def state_names(self) -> tuple[str, ...]:
        """See `Optimizer`."""
        return ("mean", "var")

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        g = self.prepared(step, w, g, tmp, decay=True)
        update_means(step, g, arrays, tmp[1], beta1=self.beta1, beta2=self.beta2)
        root = np.sqrt(arrays["var"], out=tmp[1])
        root += step.real(self.epsilon)
        change = np.divide(arrays["mean"], root, out=tmp[0])
        change *= step.real(_corrected(step.learning_rate, step.t, self.beta1, self.beta2))
        w -= change


class AdamW(Optimizer):
    """g = clip(rescale_grad * grad);  w = w - lr_t * (m / (sqrt(v) + epsilon) + wd * w).

    correct_bias=False: lr_t = lr. With it the decay, too, is scaled by the corrected rate (PyTorch's AdamW scales it by
    lr, and adds its eps to the corrected root).
    """

    default_learning_rate: ClassVar[float] = 0.001
    fields: ClassVar[Mapping[str, Field]] = {
        "beta1": number(0.0, below=1.0),
        "beta2": number(0.0, below=1.0),
        "epsilon": number(0.0),
        "correct_bias": flag,
    }
    beta1: float
    beta2: float
    epsilon: float
    correct_bias: bool

    def __init__(
        self,
        learning_rate: float | None = None,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        correct_bias: bool = True,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(learning_rate=learning_rate, **common)
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self.correct_bias = correct_bias

    def state_names(self) -> tuple[str, ...]:
        """See `Optimizer`."""
        return ("mean", "var")

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        real, rate = step.real, step.learning_rate
        update_means(step, self.prepared(step, w, g, tmp), arrays, tmp[1], beta1=self.beta1, beta2=self.beta2)
        if self.correct_bias:
            rate = _corrected(rate, step.t, self.beta1, self.beta2)
        root = np.sqrt(arrays["var"], out=tmp[1])
        root += real(self.epsilon)
        change = np.divide(arrays["mean"], root, out=tmp[0])
        if step.wd:
            change += np.multiply(w, real(step.wd), out=tmp[1])
        change *= real(rate)
        w -= change
