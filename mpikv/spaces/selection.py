"""Which values of an array are chosen: the largest, or some that are drawn. With NumPy, and as routines (routine.py).

Source of the draw: Steele, Lea and Flood, OOPSLA 2014 (SplitMix64).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.spaces.program import Argument
from mpikv.spaces.routine import COUNT, FLOAT32, POSITION, Routine, k_of_n

MAGNITUDE = np.int32(0x7FFFFFFF)
"""A float32 without its sign: as a whole number it is in the same order, NaN on top."""

_MASK = (1 << 64) - 1


def largest_positions(values: HostArray, k: int, candidates: HostArray) -> HostArray:
    """Return the positions, in increasing order, of the k largest magnitudes in float32; of equal ones the first.

    values: k or more. candidates: positions in increasing order, among which these are.
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
    k_of_n,
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


# --- drawn


def mix(number: int) -> int:
    """The output function of SplitMix64."""
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return z ^ z >> 31


def _mix_array(numbers: HostArray) -> HostArray:
    """The same of each; products of arrays are taken modulo 2^64 in any case."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: HostArray = z ^ z >> np.uint64(31)
    return mixed


@lru_cache(maxsize=64)
def _bounds(k: int, n_elems: int) -> HostArray:
    """Where the ranges begin, and where the last one ends."""
    bounds = np.arange(k + 1, dtype=np.int64) * n_elems // max(k, 1)
    bounds.flags.writeable = False
    return bounds


def drawn_positions(mixed: int, draw: int, k: int, n_elems: int) -> HostArray:
    """Return one position of each of k ranges of n elements. mixed: `mix` of the seed. draw: the number of the draw."""
    bounds = _bounds(k, n_elems)
    drawn = _mix_array(np.arange(k, dtype=np.uint64) + np.uint64(mix(mixed + draw))) >> np.uint64(32)
    lengths = np.diff(bounds).astype(np.uint64)
    positions: HostArray = bounds[:-1] + (drawn * lengths >> np.uint64(32)).astype(np.int64)
    return positions


def _draw(arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
    values, draw, positions = arrays
    mixed, k = (int(number) for number in numbers)
    positions[...] = drawn_positions(mixed & _MASK, int(draw[0]) & _MASK, k, values.size)


@lru_cache
def draw(dtype: np.dtype[Any]) -> Routine:
    """values, of which only the number counts, the number of the draw (1,), positions (k,); numbers: `mixed`, k.

    What `drawn_positions` returns. Numbers of 64 bits go as the int64 of these bits.
    """
    return Routine(
        (Argument(dtype, None, None), Argument(COUNT, 0, None), Argument(POSITION, None, 0)),
        (COUNT, COUNT),
        lambda n_elems, numbers: [n_elems, 1, int(numbers[1])],
        _draw,
        """\
    const auto mix = [](unsigned long long z) {
        z += 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        return z ^ z >> 31;
    };
    const unsigned long long start = mix((unsigned long long)n0 + (unsigned long long)a1[0]);
    for (long long i = threadIdx.x; i < n1; i += blockDim.x) {
        const unsigned long long drawn = mix(start + (unsigned long long)i) >> 32;
        const long long begin = i * n / n1, end = (i + 1) * n / n1;
        a2[i] = (int)(begin + (long long)(drawn * (unsigned long long)(end - begin) >> 32));
    }
""",
    )
