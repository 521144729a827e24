"""A routine: what threads of a GPU do to some arrays together, where no program of single elements can say it.

Each is written twice: with NumPy, for host memory, and in CUDA C++, for one block of threads. Both have the same
results, to the last bit. Several lists of arrays are done at once, by a block each.

Cost: a block has one multiprocessor, a hundredth of a large GPU: for arrays of some hundred thousand elements, as the
pieces of keys are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays import HostArray
from mpikv.spaces.program import Argument

FLOAT32, POSITION, COUNT = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)


class Routine(NamedTuple):
    """Of arguments only `dtype` counts, and whether `first` and `last` are None: whether they are read, and written.

    lengths: how many items each array has, of the number of elements and the numbers. run: does it, with NumPy. text:
    the body of the kernel, in which a0, a1, ... are the arrays, n the number of elements, n0, n1, ... the numbers.
    """

    arguments: tuple[Argument, ...]
    numbers: tuple[np.dtype[Any], ...]
    lengths: Callable[[int, Sequence[Any]], list[int]]
    run: Callable[[Sequence[HostArray], Sequence[Any]], None]
    text: str


def k_of_n(n_elems: int, numbers: Sequence[Any]) -> list[int]:
    """`Routine.lengths` of an array of n items and two of k, the first number."""
    return [n_elems, int(numbers[0]), int(numbers[0])]


_EACH = """\
    for (long long i = threadIdx.x; i < n0; i += blockDim.x) {
        const long long at = (unsigned int)a1[i];
        if (at < n) ASSIGNMENT;
    }
"""


def _inside(positions: HostArray, n_elems: int) -> HostArray:
    """Which positions are within so many elements: data that came from elsewhere may be damaged."""
    inside: HostArray = positions.view(np.uint32) < n_elems
    return inside


def _put(arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
    out, positions, values = arrays
    inside = _inside(positions, out.size)
    out[positions[inside]] = values[inside]


@lru_cache
def put(dtype: np.dtype[Any], values_dtype: np.dtype[Any]) -> Routine:
    """out, different positions (k,), values (k,); number: k. The values are written where the positions say."""
    return Routine(
        (Argument(dtype, None, 0), Argument(POSITION, 0, None), Argument(values_dtype, 0, None)),
        (COUNT,),
        k_of_n,
        _put,
        _EACH.replace("ASSIGNMENT", "a0[at] = a2[i]"),
    )


def _sums(arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
    held, positions, values, sums = arrays
    inside = _inside(positions, held.size)
    with np.errstate(all="ignore"):
        sums[inside] = held[positions[inside]] + values[inside]


@lru_cache
def sums(dtype: np.dtype[Any]) -> Routine:
    """Of held, different positions (k,), values (k,) in float32, sums (k,); number: k.

    What is held where the positions say, and the values, are added; to be put back there.
    """
    return Routine(
        (
            Argument(dtype, 0, None),
            Argument(POSITION, 0, None),
            Argument(FLOAT32, 0, None),
            Argument(dtype, None, 0),
        ),
        (COUNT,),
        lambda n_elems, numbers: [n_elems, *[int(numbers[0])] * 3],
        _sums,
        _EACH.replace("ASSIGNMENT", "a3[i] = a0[at] + a2[i]"),
    )


def _take(arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
    values, positions, found = arrays
    inside = _inside(positions, values.size)
    found[inside] = values[positions[inside]]


TAKE = Routine(
    (Argument(FLOAT32, 0, None), Argument(POSITION, 0, None), Argument(FLOAT32, None, 0)),
    (COUNT,),
    k_of_n,
    _take,
    _EACH.replace("ASSIGNMENT", "a2[i] = a0[at]"),
)
"""values, positions (k,), found (k,); number: k. The values where the positions say."""
