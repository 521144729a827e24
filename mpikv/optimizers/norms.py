"""The Euclidean norm of an array, the same bits every time.

Squares in the array's dtype, added in float64 by NumPy's pairwise sum: unlike a BLAS call, the order of additions
depends on neither threads nor the processor's vector length.
"""

from __future__ import annotations

import math

import numpy as np

from mpikv.arrays import HostArray


def norm(values: HostArray, tmp: HostArray) -> float:
    """The 2-norm of flat `values`. tmp: scratch of the same length and dtype."""
    return math.sqrt(float(np.sum(np.multiply(values, values, out=tmp), dtype=np.float64)))
