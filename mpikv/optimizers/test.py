"""The optimizer that tests are made of: no learning rate, only a sum that grows.

Source: MXNet 1.9, python/mxnet/optimizer/optimizer.py (Test).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.step import Step


class Test(Optimizer):
    """w = w + rescale_grad * grad. The other common parameters are accepted and not used.

    >>> weight, optimizer = np.ones(1), optimizers.Test(rescale_grad=0.5)
    >>> optimizer.update('w', weight, np.ones(1), optimizer.init(weight)), weight
    ({'t': 1}, array([1.5]))
    """

    lazy = True
    scratch = 1
    __test__ = False  # pytest would take the name for a test class

    def formula(
        self, step: Step, w: HostArray, g: HostArray, arrays: Mapping[str, HostArray], tmp: list[HostArray]
    ) -> None:
        """See the class."""
        del arrays
        w += g if self.rescale_grad == 1.0 else np.multiply(g, step.real(self.rescale_grad), out=tmp[0])
