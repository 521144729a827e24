"""The Euclidean norm of an array: the same bits every time, on the host and on a GPU.

Squares are added in float64, in an order that hangs on the array's length alone (spaces/folded.py), not on threads or
the processor. So workers that have the same values have the same norm. In a formula that runs on a GPU norms are not
known on the host: they are numbers that only go into further arithmetic, and `where_positive` chooses between two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.spaces import folded
from mpikv.spaces.tracing import where_positive

__all__ = ["norm", "where_positive"]


def norm(values: HostArray) -> Any:
    """Return the 2-norm of flat `values`, a number of float64. In a trace: of the weight, the gradient, an array of the
    state or a temporary one; NotAProgram for others.
    """
    if isinstance(values, np.ndarray):
        return np.sqrt(np.float64(folded.on_host(values)))
    return np.sqrt(values.sum_of_squares())
