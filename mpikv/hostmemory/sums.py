"""Adds the arrays of a host's ranks, or combines them with another function of two arrays.

One array after another is added to the sum of those before it, so the result's bits depend on their order alone.
float16 and bfloat16 are added in float32 and rounded once.

Cost: one pass over the result for each array but the first; for float16 and bfloat16 scratch memory as long as the
result in float32, unless that is what the result is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.arrays.compiled import add_half, cast_into
from mpikv.arrays.reductions import SUM, Reduction

Combine = Callable[..., object]  # combines two arrays into `out`: one of NumPy's functions, or one with such arguments
Adder = Callable[[HostArray, Sequence[HostArray]], None]  # writes the combination of the arrays to its first argument


def in_order(out: HostArray, sources: Sequence[HostArray], combine: Combine = np.add) -> None:
    """Combine all `sources`, of one length and dtype, into `out`, which may be the first of them but no other."""
    total = sources[0]
    for source in sources[1:]:
        combine(total, source, out=out)
        total = out
    if total is not out:
        out[...] = total


def newest_first(combine: Combine) -> Combine:
    """`combine` with the total as its second argument, as in a ring: of two NaNs the newer one's bits stay."""
    return lambda total, source, out: combine(source, total, out=out)


def adder_of(dtype: np.dtype[Any], op: Reduction = SUM) -> Adder:
    """Return a function that combines arrays of this dtype. A mean divides there, before rounding."""
    wide = sum_dtype(dtype)
    if wide != dtype or op.is_mean:
        return partial(_add_and_finish, wide, op)
    return in_order if op.combine is np.add else partial(in_order, combine=op.combine)


def _add_and_finish(wide: np.dtype[Any], op: Reduction, out: HostArray, sources: Sequence[HostArray]) -> None:
    total, combine = out if out.dtype == wide else np.empty(out.shape, wide), op.combine
    if sources[0].dtype == wide:
        in_order(total, sources, combine)
    elif combine is np.add:
        cast_into(total, sources[0])
        for source in sources[1:]:
            if not add_half(total, source):
                np.add(total, source, out=total)
    else:
        in_order(total, sources, partial(combine, dtype=wide))
    op.finish(total, len(sources))
    if total is not out:
        cast_into(out, total)
