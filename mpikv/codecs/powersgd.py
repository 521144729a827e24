"""PowerSGD: a codec that sends each piece as the product of two thin matrices.

The n values of a piece are seen as a matrix M, row by row, with c columns and ceil(n / c) rows, filled up with zeros. A
key of two dimensions or more has a row for each element of the first, as in the paper: in that shape the gradient of a
layer has a low rank. Its pieces are whole rows; without servers a piece has at least as many rows as columns, if its
owner's shard does. c = ceil(sqrt(n)) for keys of one dimension, for keys whose factors in their own shape would be no
shorter than the values, as of (2, 50000), and for buckets of several arrays. One step of a power iteration, which
begins with the Q of the push before, finds the main directions of M:

    P = M Q,  P = orthonormal columns of P,  Q = M^T P

P and Q, float32 and `rank` columns each, are sent; they decode to P Q^T. Error feedback keeps the difference to M.
Q stays in the state, so that the directions get better from push to push; it begins with fixed numbers from -1 to 1.
A column of Q that has become zero begins anew. A piece that is no longer than its factors is sent whole, in float32.

The paper adds P over the workers, and then Q, in one iteration. Here each worker's push has factors of its own, and
their products are added: the sum has up to `rank` times as many directions as there are workers.

A piece with a NaN or an infinity, or whose factors do not fit into float32, is sent as NaN, and Q begins anew.

Sums are made in float64 and rounded once, so that the bytes rarely depend on the order in which a BLAS or a GPU adds.
Decoding multiplies and adds in float32, column by column, with the same bits everywhere.

Wire: 4 rank (rows + columns) bytes, about 8 rank sqrt(n); at most 4 n. State: Q. Cost: two passes with 2 rank
multiplications and additions for each value, in float64, and about 2 rank passes over blocks in the cache to decode.
Source: Vogels, Karimireddy and Jaggi, NeurIPS 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.base import State
from mpikv.codecs.blocks import BLOCK_ELEMS, FLOAT32, InBlocks, as_float32, empty, spans, step_of
from mpikv.common.checks import whole

FLOAT64 = np.dtype(np.float64)
_FACTOR = np.dtype("<f4")
_DEPENDENT = 1e-12  # a column of which no more is left than this share of its length, in float64, is rounding error


@dataclass(frozen=True)
class PowerSGD(InBlocks):
    """Sends two factors. rank: how many columns they have. columns: c; 0: by the key's shape, or nearly square."""

    rank: int = 2
    columns: int = 0

    name = "powersgd"
    on_device = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", whole("powersgd: rank", self.rank, 1, 1 << 16))
        object.__setattr__(self, "columns", whole("powersgd: columns", self.columns, 0))

    @property
    def row_elems(self) -> int:
        return self.columns or 1

    def for_shape(self, shape: tuple[int, ...]) -> PowerSGD:
        """Return a codec with a row for each element of the first dimension, if factors of that shape are shorter."""
        columns = math.prod(shape[1:])
        saves = len(shape) > 1 and self.rank * (shape[0] + columns) < math.prod(shape)
        return replace(self, columns=columns) if saves and not self.columns else self

    def _shape(self, n_elems: int) -> tuple[int, int]:
        columns = self.columns or math.isqrt(max(n_elems - 1, 0)) + 1
        return -(-n_elems // columns), columns

    def matrix(self, n_elems: int) -> tuple[int, int] | None:
        """Return the rows and columns of the matrix; None if its factors are no shorter than the values."""
        shape = self._shape(n_elems)
        return None if self.rank * sum(shape) >= n_elems else shape

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        shape = self.matrix(n_elems)
        return _FACTOR.itemsize * (n_elems if shape is None else self.rank * sum(shape))

    def init(self, n_elems: int) -> State:
        shape = self.matrix(n_elems)
        return {} if shape is None else {"q": _first_numbers(shape[1], self.rank, np.empty(0))}

    def encode(self, values: HostArray, state: State) -> HostArray:
        if (shape := self.matrix(values.size)) is None:
            return as_float32(values).astype(_FACTOR).view(np.uint8)
        rows, columns = shape
        with np.errstate(all="ignore"):
            q = state["q"].astype(FLOAT64)
            p = empty(values, rows * self.rank, FLOAT64).reshape(rows, self.rank)
            for span, matrix in _rows(values, rows, columns):
                np.matmul(matrix, q, out=p[span])
            _orthonormalize(p)
            sent_p = p.astype(_FACTOR)
            p = sent_p.astype(FLOAT64)
            q = np.zeros_like(q)
            for span, matrix in _rows(values, rows, columns):
                q += matrix.T @ p[span]
            sent_q = q.astype(_FACTOR)
        factors = np.concatenate([sent_p.reshape(-1), sent_q.reshape(-1)])
        _next_numbers(factors, state["q"], sent_q)
        return factors.view(np.uint8)

    def blocks(self, data: HostArray, n_elems: int) -> Iterator[tuple[slice, HostArray]]:
        """Yield some rows of P Q^T at a time."""
        numbers = data.view(_FACTOR)
        if (shape := self.matrix(n_elems)) is None:
            yield slice(0, n_elems), numbers
            return
        rows, columns = shape
        p = numbers[: rows * self.rank].reshape(rows, self.rank)
        q = numbers[rows * self.rank :].reshape(columns, self.rank).T.astype(FLOAT32, order="C")
        with np.errstate(over="ignore", invalid="ignore"):
            for span in spans(rows, step_of(data, rows, _rows_of_a_block(columns))):
                values = p[span, :1] * q[:1]
                for i in range(1, self.rank):
                    values += p[span, i : i + 1] * q[i : i + 1]
                where = slice(span.start * columns, min(span.stop * columns, n_elems))
                yield where, values.reshape(-1)[: where.stop - where.start]


def _rows_of_a_block(columns: int) -> int:
    return max(BLOCK_ELEMS // columns, 1)


def _rows(values: HostArray, rows: int, columns: int) -> Iterator[tuple[slice, HostArray]]:
    """Yield some rows of the matrix at a time, in float64."""
    for span in spans(rows, step_of(values, rows, _rows_of_a_block(columns))):
        found = as_float32(values[span.start * columns : span.stop * columns])
        matrix = empty(found, (span.stop - span.start) * columns, FLOAT64)
        matrix[: found.size] = found
        matrix[found.size :] = 0.0
        yield span, matrix.reshape(-1, columns)


def _orthonormalize(p: HostArray) -> None:
    """Make the columns orthonormal, by Gram and Schmidt; a column that depends on those before it becomes 0."""
    for i in range(p.shape[1]):
        column = p[:, i]
        length = np.sqrt(np.dot(column, column))
        for _ in range(2):  # the second time removes what rounding has left
            for j in range(i):
                column -= np.dot(p[:, j], column) * p[:, j]
        left = np.sqrt(np.dot(column, column))
        column[...] = np.where(left <= _DEPENDENT * length, 0.0, column / left)


def _first_numbers(columns: int, rank: int, array: HostArray) -> HostArray:
    """Return (columns, rank) numbers from -1 to 1, hashes of their positions, in the memory of `array`."""
    z = np.arange(columns * rank, dtype=np.uint64, like=array) + np.uint64(1)
    z = z * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    z = z ^ z >> np.uint64(32)
    numbers: HostArray = (z >> np.uint64(40)).astype(FLOAT32) / np.float32(1 << 23) - np.float32(1)
    return numbers.reshape(columns, rank)


def _next_numbers(factors: HostArray, q: HostArray, sent_q: HostArray) -> None:
    """Write Q for the next step: the sent one, but first numbers for a column of zeros or if a factor is not finite.

    factors: the numbers of both, float32; they become NaN if one is not finite. q, sent_q: (columns, rank), float32.
    """
    columns, rank = q.shape
    fine = np.isfinite(factors).all()
    np.copyto(factors, np.float32(np.nan), where=~fine)
    q[...] = np.where(fine & sent_q.any(axis=0), sent_q, _first_numbers(columns, rank, q))
