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
MAGNITUDE = np.int32(0x7FFFFFFF)
"""A float32 without its sign: as a whole number it is in the same order, NaN on top."""


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


def largest_positions(values: HostArray, k: int, candidates: HostArray) -> HostArray:
    """Return the positions, in increasing order, of the k largest magnitudes in float32; of equal ones the first.

    values: more than k. candidates: positions in increasing order, among which these are.
    """
    found = values[candidates].view(np.int32) & MAGNITUDE
    kth = np.partition(found, found.size - k)[found.size - k]
    chosen = found > kth
    chosen[np.flatnonzero(found == kth)[: k - np.count_nonzero(chosen)]] = True
    positions: HostArray = candidates[chosen]
    return positions


def _largest(arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
    values, positions, found = arrays
    positions[...] = largest_positions(values, int(numbers[0]), np.arange(values.size))
    found[...] = values[positions]


LARGEST = Routine(
    (Argument(FLOAT32, 0, None), Argument(POSITION, None, 0), Argument(FLOAT32, None, 0)),
    (COUNT,),
    lambda n_elems, numbers: [n_elems, int(numbers[0]), int(numbers[0])],
    _largest,
    """\
    __shared__ unsigned int counts[256], above[THREADS], equal[THREADS], kth, left;
    const unsigned int t = threadIdx.x, threads = blockDim.x;
    if (t == 0) {
        kth = 0;  // the magnitude of the k-th, eight bits at a time
        left = (unsigned int)n0;  // how many are wanted of those that have the bits found so far
    }
    unsigned int known = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (unsigned int i = t; i < 256; i += threads) counts[i] = 0;
        __syncthreads();
        for (long long i = t; i < n; i += threads) {
            const unsigned int found = __float_as_uint(a0[i]) & 0x7fffffffu;
            if ((found & known) == kth) atomicAdd(&counts[found >> shift & 255u], 1u);
        }
        __syncthreads();
        if (t == 0) {
            unsigned int digit = 255;
            while (counts[digit] < left) left -= counts[digit--];
            kth |= digit << shift;
        }
        known |= 255u << shift;
        __syncthreads();
    }
    // Each thread writes what it finds in one run of elements, behind what those before it have found.
    const long long run = (n + threads - 1) / threads;
    const long long begin = run * t < n ? run * t : n, end = begin + run < n ? begin + run : n;
    unsigned int more = 0, same = 0;
    for (long long i = begin; i < end; ++i) {
        const unsigned int found = __float_as_uint(a0[i]) & 0x7fffffffu;
        more += found > kth;
        same += found == kth;
    }
    above[t] = more;
    equal[t] = same;
    __syncthreads();
    unsigned int at = 0, passed = 0;
    for (unsigned int i = 0; i < t; ++i) {
        at += above[i];
        passed += equal[i];
    }
    at += passed < left ? passed : left;
    for (long long i = begin; i < end; ++i) {
        const unsigned int found = __float_as_uint(a0[i]) & 0x7fffffffu;
        if (found > kth || (found == kth && passed < left)) {
            a1[at] = (int)i;
            a2[at++] = a0[i];
        }
        passed += found == kth;
    }
""",
)
"""values, positions (k,), found (k,); number: k, from 1 to all. The k largest magnitudes: see `largest_positions`."""

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
        lambda n_elems, numbers: [n_elems, int(numbers[0]), int(numbers[0])],
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
