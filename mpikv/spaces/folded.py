"""The sum of an array's squares, in float64: with the same bits on the host and on a GPU, where it stays.

The array is folded: its first, second, ... sixteenth of the same length are added element by element, in this order,
and what is left behind them is put at the end. That is done again until one number is left. Each fold is one program
of whole arrays; so a GPU does it as it does updates, and no order hangs on blocks, threads or the processor.

Cost of n elements: read once; n / 15 numbers of float64 are written and read again. On a GPU one launch for each fold,
6 for 4 million elements, and one more for each that does not divide by 16. The relative error is below 1e-14, since a
number takes part in at most 15 additions in each fold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.spaces import arithmetic
from mpikv.spaces.base import Space, SpaceArray
from mpikv.spaces.program import Program

WAYS = 16
BLOCK_ELEMS = 1 << 14  # on the host: the two blocks that it works on stay in a core's L1 and L2 cache
FLOAT64 = np.dtype(np.float64)


def on_host(values: HostArray) -> float:
    """Of a flat array, 0.0 where it is empty."""
    total = values if values.size else np.zeros(1)
    square = True
    while square or total.size > 1:
        total, square = _fold_on_host(total, square=square), False
    return float(total[0])


def _fold_on_host(values: HostArray, *, square: bool) -> HostArray:
    ways, length = _cut(values.size)
    rest = values[ways * length :].astype(np.float64)
    out = np.empty(length + rest.size)
    out[length:] = rest * rest if square else rest
    part = np.empty(min(length, BLOCK_ELEMS))
    for begin in range(0, length, BLOCK_ELEMS):
        total = out[begin : min(begin + BLOCK_ELEMS, length)]
        for i in range(ways):
            source = values[i * length + begin : i * length + begin + total.size]
            one = total if i == 0 else part[: total.size]
            one[...] = source
            if square:
                one *= one
            if i:
                total += one
    return out


def _cut(n: int) -> tuple[int, int]:
    """In how many parts of which length; what is left is shorter than the number of parts."""
    return (WAYS, n // WAYS) if n > WAYS else (n, 1)


def on_device(space: Space, launch: Callable[[Program, Sequence[SpaceArray]], None], values: SpaceArray) -> SpaceArray:
    """The same as one number of float64 in the array's own memory, (1,). values: not empty. Nothing is waited for."""
    square = True
    while square or values.size > 1:
        ways, length = _cut(values.size)
        left = values.size - ways * length
        out: Any = space.empty(length + left, FLOAT64)
        parts = [values[i * length : (i + 1) * length] for i in range(ways)]
        launch(_program(ways, values.dtype, square=square), [*parts, out[:length]])
        if left:
            launch(_program(1, values.dtype, square=square), [values[ways * length :], out[length:]])
        values, square = out, False
    return values


def _program(ways: int, dtype: np.dtype[Any], *, square: bool) -> Program:
    if square:
        return arithmetic.squares_in_order(ways, dtype)
    return arithmetic.sum_in_order(ways, FLOAT64, FLOAT64)
