"""The Euclidean norm of an array: the same bits every time.

Squares are added in float64 by NumPy's pairwise sum: unlike a BLAS call, the order of its additions depends on neither
threads nor the processor's vector length. So workers that have the same values have the same norm.
"""

from __future__ import annotations

import math

import numpy as np

from mpikv.arrays import HostArray


def norm(values: HostArray, tmp: HostArray) -> float:
    """Return the 2-norm of flat `values`. tmp: scratch of the same length and dtype."""
    return math.sqrt(float(np.sum(np.multiply(values, values, out=tmp), dtype=np.float64)))
