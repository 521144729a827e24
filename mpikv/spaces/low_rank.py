"""One step of a power iteration with a matrix M, row by row in memory: with NumPy, as routines (routine.py).

`products` and `products_of_columns` make partial sums of M Q and of M^T P: of a tile, some rows of M by some of its
columns. `fold` adds those of an element. `ORTHONORMALIZE` works on the columns of P, `AGAIN` makes the next Q, and
`expand` multiplies P Q^T. Which tiles there are is for whoever launches them (codecs/powersgd_device).

Every sum is one of float64 in an order that the text says, so that results do not depend on the number of threads. What
lies behind the end of the values counts as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.spaces.program import Argument
from mpikv.spaces.routine import COUNT, FLOAT32, Routine

FLOAT64 = np.dtype(np.float64)
DEPENDENT = 1e-12
"""Of a column's length, in float64: what is left of it is rounding."""

_LANES = 128  # partial sums of a column


def first_numbers(columns: int, rank: int) -> HostArray:
    """Return (columns, rank) numbers from -1 to 1 that look random: an integer hash of where they are."""
    z = np.arange(columns * rank, dtype=np.uint64) + np.uint64(1)
    z = z * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    z = z ^ z >> np.uint64(32)
    numbers: HostArray = (z >> np.uint64(40)).astype(FLOAT32) / np.float32(1 << 23) - np.float32(1)
    return numbers.reshape(columns, rank)


# --- sums of products

_SUMS = """\
    for (long long o = threadIdx.x; o < OUTER * n1; o += blockDim.x) {
        const long long own = o / n1, k = o % n1;
        double sum = 0.0;
        for (long long i = 0; i < INNER; ++i) {
            const long long at = AT;
            if (at < n) sum += (double)a0[at] * (double)a1[i * n1 + k];
        }
        a2[o] = sum;
    }
"""


def _tile(values: HostArray, columns: int, width: int, height: int) -> HostArray:
    """The rows and columns of a tile that begins with the first of the values, in float64."""
    tile = np.zeros(height * columns)
    tile[: values.size] = values[: tile.size]
    return tile.reshape(height, columns)[:, :width]


def _add_products(lines: HostArray, factors: HostArray, rank: int, out: HostArray) -> None:
    """The sum over the lines, one after the other, of each number with the factors of its line."""
    sums = out.reshape(-1, rank)
    sums[...] = 0.0
    with np.errstate(all="ignore"):
        for line, factor in zip(lines, factors.reshape(-1, rank).astype(FLOAT64), strict=True):
            sums += line[:, None] * factor


def _products(arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
    values, q, out = arrays
    columns, rank, width, height = (int(number) for number in numbers)
    _add_products(_tile(values, columns, width, height).T, q, rank, out)


def _products_of_columns(arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
    values, p, out = arrays
    columns, rank, width, height = (int(number) for number in numbers)
    _add_products(_tile(values, columns, width, height), p, rank, out)


PRODUCTS = Routine(
    (Argument(FLOAT32, 0, None), Argument(FLOAT32, 0, None), Argument(FLOAT64, None, 0)),
    (COUNT,) * 4,
    lambda n_elems, numbers: [n_elems, int(numbers[1] * numbers[2]), int(numbers[1] * numbers[3])],
    _products,
    _SUMS.replace("OUTER", "n3").replace("INNER", "n2").replace("AT", "own * n0 + i"),
)
"""M from the tile on, Q of its columns (width, rank), out (height, rank); numbers: columns of M, rank, width, height.

The sum over the columns of the tile, for each of its rows.
"""

PRODUCTS_OF_COLUMNS = Routine(
    (Argument(FLOAT32, 0, None), Argument(FLOAT64, 0, None), Argument(FLOAT64, None, 0)),
    (COUNT,) * 4,
    lambda n_elems, numbers: [n_elems, int(numbers[1] * numbers[3]), int(numbers[1] * numbers[2])],
    _products_of_columns,
    _SUMS.replace("OUTER", "n2").replace("INNER", "n3").replace("AT", "i * n0 + own"),
)
"""M from the tile on, P of its rows (height, rank), out (width, rank); numbers as those of `PRODUCTS`.

The sum over the rows of the tile, for each of its columns.
"""


def _fold(arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
    out, sums = arrays
    total = np.zeros(out.size)
    with np.errstate(all="ignore"):
        for begin in range(0, int(numbers[0]) * int(numbers[1]), int(numbers[1])):
            total += sums[begin : begin + out.size]
        out[...] = total


@lru_cache
def fold(dtype: np.dtype[Any]) -> Routine:
    """out (n,), partial sums; numbers: how many there are of each element, how far apart. They are added in order."""
    return Routine(
        (Argument(dtype, None, 0), Argument(FLOAT64, 0, None)),
        (COUNT,) * 2,
        lambda n_elems, numbers: [n_elems, int(numbers[0] - 1) * int(numbers[1]) + n_elems],
        _fold,
        """\
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        double total = 0.0;
        for (long long s = 0; s < n0; ++s) total += a1[s * n1 + i];
        a0[i] = total;
    }
""",
    )


# --- the columns of P


def _dot(one: HostArray, other: HostArray) -> Any:
    """The sum of the products: of each lane, then of all lanes."""
    lanes = np.zeros(-(-one.size // _LANES) * _LANES)
    lanes[: one.size] = one * other
    sums, total = np.zeros(_LANES), FLOAT64.type(0)
    for row in lanes.reshape(-1, _LANES):
        sums += row
    for lane in sums:
        total += lane
    return total


def orthonormalize(p: HostArray, dot: Callable[[HostArray, HostArray], Any]) -> None:
    """Make the columns orthonormal, by Gram and Schmidt; what depends on those before it becomes 0."""
    for i in range(p.shape[1]):
        column = p[:, i]
        length = np.sqrt(dot(column, column))
        for _ in range(2):  # once more for what rounding has left
            for j in range(i):
                column -= dot(p[:, j], column) * p[:, j]
        left = np.sqrt(dot(column, column))
        if left <= DEPENDENT * length:
            column[...] = 0.0
        else:
            column /= left


def _orthonormalize(arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
    p, sent = arrays
    with np.errstate(all="ignore"):
        orthonormalize(p.reshape(-1, int(numbers[0])), _dot)
        sent[...] = p
    p[...] = sent


ORTHONORMALIZE = Routine(
    (Argument(FLOAT64, 0, 0), Argument(FLOAT32, None, 0)),
    (COUNT,),
    lambda n_elems, numbers: [n_elems, n_elems],
    _orthonormalize,
    """\
    __shared__ double lanes[LANES];
    const long long t = threadIdx.x, step = blockDim.x, rows = n / n0;
    const auto dot = [&](long long one, long long other) {
        for (long long lane = t; lane < LANES; lane += step) {
            double sum = 0.0;
            for (long long i = lane; i < rows; i += LANES) sum += a0[i * n0 + one] * a0[i * n0 + other];
            lanes[lane] = sum;
        }
        __syncthreads();
        double total = 0.0;
        for (int lane = 0; lane < LANES; ++lane) total += lanes[lane];
        __syncthreads();
        return total;
    };
    for (long long k = 0; k < n0; ++k) {
        const double length = sqrt(dot(k, k));
        for (int pass = 0; pass < 2; ++pass)
            for (long long j = 0; j < k; ++j) {
                const double along = dot(j, k);
                for (long long i = t; i < rows; i += step) a0[i * n0 + k] -= along * a0[i * n0 + j];
                __syncthreads();
            }
        const double left = sqrt(dot(k, k));
        const bool depends = left <= DEPENDENT * length;
        for (long long i = t; i < rows; i += step) a0[i * n0 + k] = depends ? 0.0 : a0[i * n0 + k] / left;
        __syncthreads();
    }
    for (long long i = t; i < n; i += step) {
        a1[i] = (float)a0[i];
        a0[i] = a1[i];
    }
""".replace("LANES", str(_LANES)).replace("DEPENDENT", repr(DEPENDENT)),
)
"""P (rows, rank), P where it travels; number: rank. Of what travels both have the values."""


# --- the next Q


def next_numbers(factors: HostArray, q: HostArray, sent_q: HostArray) -> None:
    """Write Q for the next step: what was sent; of a column of zeros, or if a factor is not finite, numbers anew.

    factors: of both, float32, become NaN in the second case. q, sent_q: (columns, rank), float32.
    """
    start = first_numbers(*q.shape)
    if np.isfinite(factors).all():
        q[...] = np.where(sent_q.any(axis=0), sent_q, start)
    else:
        factors[...] = np.nan
        q[...] = start


def _again(arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
    factors, q = arrays
    shape = tuple(int(number) for number in numbers)
    next_numbers(factors, q.reshape(shape), factors[factors.size - q.size :].reshape(shape))


AGAIN = Routine(
    (Argument(FLOAT32, 0, 0), Argument(FLOAT32, None, 0)),
    (COUNT,) * 2,
    lambda n_elems, numbers: [n_elems, int(numbers[0] * numbers[1])],
    _again,
    """\
    __shared__ unsigned int found;
    const long long t = threadIdx.x, step = blockDim.x;
    if (t == 0) found = 0;
    __syncthreads();
    for (long long i = t; i < n; i += step)
        if (!(a0[i] - a0[i] == 0.0f)) atomicAdd(&found, 1u);
    __syncthreads();
    const bool broken = found != 0;
    if (broken)
        for (long long i = t; i < n; i += step) a0[i] = __uint_as_float(0x7fc00000u);
    const long long begin = n - n0 * n1;
    for (long long k = 0; k < n1; ++k) {
        __syncthreads();
        if (t == 0) found = 0;
        __syncthreads();
        for (long long j = t; j < n0; j += step)
            if (a0[begin + j * n1 + k] != 0.0f) atomicAdd(&found, 1u);
        __syncthreads();
        const bool anew = broken || found == 0;
        for (long long j = t; j < n0; j += step) {
            unsigned long long z = (unsigned long long)(j * n1 + k + 1) * 0x9E3779B97F4A7C15ull;
            z = (z ^ z >> 32) * 0xD6E8FEB86659FD93ull;
            z = z ^ z >> 32;
            a1[j * n1 + k] = anew ? (float)(z >> 40) / 8388608.0f - 1.0f : a0[begin + j * n1 + k];
        }
    }
""",
)
"""P and Q where they travel, Q (columns, rank); numbers: columns, rank. See `next_numbers`."""


# --- their product

_EXPAND = """\
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        const long long row = i / n0, column = i % n0;
        float value = a1[row * n1] * a2[column * n1];
        for (long long k = 1; k < n1; ++k) value += a1[row * n1 + k] * a2[column * n1 + k];
        ASSIGNMENT;
    }
"""
_ASSIGNMENTS = {
    "write": "a0[i] = value",
    "add": "a0[i] += value",
    "left": "const float left = a0[i] - value; a0[i] = left - left == 0.0f ? left : 0.0f",
}


@lru_cache
def expand(dtype: np.dtype[Any], use: str) -> Routine:
    """out, the values of some rows, P of these rows (rows, rank), Q (columns, rank); numbers: columns, rank.

    use: to 'write' P Q^T, in float32 column by column, to 'add' it, or to leave what is 'left' without it: of that what
    is not finite becomes 0. The last row of `out` may be shorter.
    """

    def run(arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
        out, p, q = arrays
        columns, rank = (int(number) for number in numbers)
        p, q = p.reshape(-1, rank), q.reshape(columns, rank)
        with np.errstate(all="ignore"):
            found = np.multiply.outer(p[:, 0], q[:, 0])
            for k in range(1, rank):
                found += np.multiply.outer(p[:, k], q[:, k])
            values = found.reshape(-1)[: out.size]
            if use == "write":
                out[...] = values
            elif use == "add":
                out += values
            else:
                left = out - values
                out[...] = np.where(np.isfinite(left), left, np.float32(0))

    return Routine(
        (Argument(dtype, None if use == "write" else 0, 0), Argument(FLOAT32, 0, None), Argument(FLOAT32, 0, None)),
        (COUNT,) * 2,
        lambda n_elems, numbers: [
            n_elems,
            -(-n_elems // int(numbers[0])) * int(numbers[1]),
            int(numbers[0] * numbers[1]),
        ],
        run,
        _EXPAND.replace("ASSIGNMENT", _ASSIGNMENTS[use]),
    )
