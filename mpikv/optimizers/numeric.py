"""The dtypes of an update: what it accepts, and what it calculates in.

float64, int32 and int64 weights are updated in float64, which holds every int32 exactly and int64 up to 2^53; all
others (float16, bfloat16, float32, int8, uint8) in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import SUPPORTED_DTYPES, is_space_array

_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)
_WIDE = (_FLOAT64, np.dtype(np.int32), np.dtype(np.int64))


def work_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that an update of weights of `dtype` calculates in."""
    return _FLOAT64 if dtype in _WIDE else _FLOAT32


def check_array(owner: str, what: str, array: Any) -> None:
    """Raise TypeError for anything but an array of a space (NumPy's in host memory) of a supported dtype."""
    if not is_space_array(array):
        raise TypeError(f"{owner}: {what} is a NumPy array, not {type(array).__name__}")
    if array.dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
        raise TypeError(f"{owner}: {what} has dtype {array.dtype}; supported are {names}")
