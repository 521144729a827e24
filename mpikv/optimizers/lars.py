"""LARS: SGD whose learning rate is scaled, key by key, to the ratio of the weight's norm to the gradient's.

It needs the norms of a key's whole value, so its keys are not cut.

Cost per update: that of SGD, and both arrays read once more for their norms. Source: You, Gitman and Ginsburg,
arXiv:1708.03888; correction of the momentum: Goyal et al., arXiv:1706.02677; in the form of MXNet 1.9,
python/mxnet/optimizer/optimizer.py (LARS).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from mpikv.arrays import HostArray
from mpikv.optimizers.base import Common, Optimizer, Step
from mpikv.optimizers.fields import Field, flag, number, texts
from mpikv.optimizers.norms import norm
from mpikv.optimizers.sgd import momentum_step

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LARS(Optimizer):
    """SGD at the rate lr * eta * |w| / (|rescale_grad * grad| + wd * |w| + eps); at lr where either norm is 0.

    The norm is that of the gradient before clipping. momentum_correction: the momentum is multiplied by the ratio of
    this update's learning rate (before factors) to the last one's, so that a change of rate acts on old steps as well.
    skip: string keys with one of these endings are updated at lr, as biases and normalisation parameters should be;
    `skip=()` leaves out none. lazy_update: taken for MXNet's sake, without effect.
    """

    elementwise: bool = False
    fields: ClassVar[Mapping[str, Field]] = {
        "momentum": number(0.0),
        "lazy_update": flag,
        "eta": number(0.0),
        "eps": number(0.0),
        "momentum_correction": flag,
        "skip": texts,
    }
    scratch: ClassVar[int] = 1
    momentum: float
    lazy_update: bool
    eta: float
    eps: float
    momentum_correction: bool
    skip: tuple[str, ...]

    def __init__(
        self,
        *,
        learning_rate: float | None = None,
        momentum: float = 0.0,
        lazy_update: bool = True,
        eta: float = 0.001,
        eps: float = 0.0,
        momentum_correction: bool = True,
        skip: tuple[str, ...] = ("gamma", "beta", "bias"),
        **common: Unpack[Common],
    ) -> None:
        super().__init__(learning_rate=learning_rate, **common)
        self.momentum = momentum
        self.lazy_update = lazy_update
        self.eta = eta
        self.eps = eps
        self.momentum_correction = momentum_correction
        self.skip = skip

    def state_names(self) -> tuple[str, ...]:
        """See `Optimizer`."""
        return ("momentum",) if self.momentum else ()

    def numbers(self) -> dict[str, int | float]:
        """See `Optimizer`; the last update's learning rate is among them, 0 before the first."""
        return {"t": 0, "last_rate": 0.0}

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        momentum, last_rate = self.momentum, step.state["last_rate"]
        if self.momentum_correction and last_rate:
            momentum *= step.global_rate / last_rate
        step.state["last_rate"] = step.global_rate
        rate = step.learning_rate * self._ratio(step, w, g, tmp[0])
        step = step._replace(learning_rate=rate)
        momentum_step(self, step, w, g, tmp, mom=arrays.get("momentum"), momentum=momentum)

    def _ratio(self, step: Step, w: HostArray, g: HostArray, tmp: HostArray) -> float:
        if isinstance(step.key, str) and step.key.endswith(self.skip):
            return 1.0
        w_norm, g_norm = norm(w, tmp), norm(g, tmp) * abs(self.rescale_grad)
        if w_norm > 0.0 and g_norm > 0.0:
            return self.eta * w_norm / (g_norm + step.wd * w_norm + self.eps)
        return 1.0
