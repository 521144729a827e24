"""LARS: SGD whose learning rate is scaled, key by key, to the ratio of the weight's norm to the gradient's.

It needs the norms of a key's whole value, so its keys are not cut.

Cost per update: that of SGD, and both arrays read once more for their norms. Source: You, Gitman and Ginsburg,
arXiv:1708.03888; correction of the momentum: Goyal et al., arXiv:1706.02677; in the form of MXNet 1.9,
python/mxnet/optimizer/optimizer.py (LARS).
"""

from __future__ import annotations

from collections.abc import Mapping

from mpikv.arrays import HostArray
from mpikv.optimizers.base import Array, Optimizer, Scalar, Step
from mpikv.optimizers.fields import flag, number, texts
from mpikv.optimizers.norms import norm
from mpikv.optimizers.sgd import momentum_step


class LARS(Optimizer):
    """SGD at the rate lr * eta * |w| / (|rescale_grad * grad| + wd * |w| + eps); at lr where either norm is 0.

    The norm is that of the gradient before clipping. With momentum_correction the momentum is multiplied by the ratio
    of this update's learning rate (before factors) to the last one's, so that a change of rate acts on old steps, too.

    >>> weight, optimizer = np.ones(1), optimizers.LARS(learning_rate=0.5, eta=0.5)
    >>> state = optimizer.update('w', weight, np.ones(1), optimizer.init(weight))
    >>> weight
    array([0.75])
    """

    momentum: float = number(default=0.0, low=0.0, doc="how much of the last step is made again")
    lazy_update: bool = flag(default=True, doc="taken for MXNet's sake; row-sparse keys are refused")
    eta: float = number(default=0.001, low=0.0, doc="factor of the ratio of the norms")
    eps: float = number(default=0.0, low=0.0, doc="added below the fraction")
    momentum_correction: bool = flag(default=True, doc="whether a change of the rate acts on the last step, too")
    skip: tuple[str, ...] = texts(
        default=("gamma", "beta", "bias"),
        doc="endings of the keys that are updated at lr, as biases and normalisation parameters should be",
    )
    states = (
        Array("momentum", "the last step", where="momentum"),
        Scalar("last_rate", "the last update's learning rate, 0 before the first", 0.0),
    )
    elementwise = False
    scratch = 1

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
