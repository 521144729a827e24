"""The Euclidean norm of an array, or of many together: the same bits every time.

Squares are added in float64 by NumPy's pairwise sum: unlike a BLAS call, the order of its additions depends on neither
threads nor the processor's vector length. So workers that have the same values have the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from mpikv.arrays import HostArray


def norm(values: HostArray, tmp: HostArray) -> float:
    """Return the 2-norm of flat `values`. tmp: scratch of the same length and dtype."""
    return math.sqrt(float(np.sum(np.multiply(values, values, out=tmp), dtype=np.float64)))


PART_ELEMS = 1 << 16  # squared at a time: half a megabyte of float64 stays in the cache


def global_norm(arrays: Iterable[HostArray]) -> float:
    """Return the 2-norm of all elements of some arrays, of any shapes and dtypes; squares in float64."""
    total = 0.0
    for array in arrays:
        flat = array.reshape(-1)
        for begin in range(0, flat.size, PART_ELEMS):
            part = flat[begin : begin + PART_ELEMS].astype(np.float64)
            total += float(np.sum(np.multiply(part, part, out=part)))
    return math.sqrt(total)
