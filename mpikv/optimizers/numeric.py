"""The dtypes of an update: what it accepts, what it calculates in, and how results are rounded into the weight.

float64, int32 and int64 weights are updated in float64, which holds every int32 exactly and int64 up to 2^53; all
others (float16, bfloat16, float32, int8, uint8) in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv.arrays import SUPPORTED_DTYPES, HostArray

_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)
_WIDE = (_FLOAT64, np.dtype(np.int32), np.dtype(np.int64))


def work_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that an update of weights of `dtype` calculates in."""
    return _FLOAT64 if dtype in _WIDE else _FLOAT32


def check_array(owner: str, what: str, array: object) -> None:
    """TypeError for anything but a NumPy array of a supported dtype."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{owner}: {what} is a NumPy array, not {type(array).__name__}")
    if array.dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
        raise TypeError(f"{owner}: {what} has dtype {array.dtype}; supported are {names}")


def round_into(out: HostArray, values: HostArray) -> None:
    """Write `values` into `out`, each rounded once to its dtype.

    To integers: to nearest, halves to even, limited to the range, NaN to 0; `values` serves as scratch then.
    """
    if out.dtype.kind in "iu":
        limits, real = np.iinfo(out.dtype), values.dtype.type
        # 2^63 - 1 is no float64 and would become 2^63, which int64 does not hold: take the float below.
        high = np.nextafter(real(2.0**63), real(0.0)) if out.dtype == np.int64 else real(limits.max)
        np.rint(values, out=values)
        np.maximum(values, real(limits.min), out=values)
        np.minimum(values, high, out=values)
        values[np.isnan(values)] = 0.0
    np.copyto(out, values, casting="unsafe")
