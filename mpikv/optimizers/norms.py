"""The Euclidean norm of an array: the same bits every time (spaces/folded.py).

So workers that have the same values have the same norm. On a GPU a norm is not known on the host: it is a number that
only goes into further arithmetic, and `np.where` chooses between two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.spaces.folded import sum_of_squares

__all__ = ["norm"]


def norm(values: HostArray) -> Any:
    """Return the 2-norm of flat `values`: a number of float64, which stays where they are."""
    return np.sqrt(sum_of_squares(values))
