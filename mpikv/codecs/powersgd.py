"""PowerSGD: each piece as the product of two thin matrices.

The n values of a piece are a matrix M, row by row, with c columns and ceil(n / c) rows, filled up with zeros. A key of
two dimensions or more has a row for each element of the first, as in the paper: in that shape the gradient of a layer
has a low rank. Pieces are whole rows, without servers as many as there are columns or more, where an owner has as many.
Keys of one dimension, those whose factors in their own shape would be no shorter than the values, as of (2, 50000), and
buckets of several arrays have c = ceil(sqrt(n)). One step of a power iteration, which begins with the Q of the push
before, finds its main directions:

    P = M Q,  P = orthonormal columns of P,  Q = M^T P

P and Q, float32 and `rank` columns each, travel; they decode to P Q^T. What that leaves is what error feedback is for.
Q stays in the state, so that the directions get better from push to push; it begins with fixed numbers from -1 to 1.
A column of Q that has become zero begins anew. A piece that is no longer than its factors is sent as it is, in float32.

The paper adds P over the workers, and then Q, in one iteration. Here each worker's push has factors of its own, and
what they decode to is added: the sum has up to `rank` times as many directions as there are workers.

A piece with a NaN or an infinity, or whose factors do not fit into float32, is sent as NaN, and Q begins anew.

Sums are made in float64 and rounded once, so that the bytes do not depend on the order in which a BLAS adds, but for
rare cases; decoding multiplies and adds in float32, column by column, with the same bits everywhere.

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

from mpikv.arrays import HostArray
from mpikv.checks import whole
from mpikv.codecs.base import State
from mpikv.codecs.blocks import BLOCK_ELEMS, FLOAT32, InBlocks, as_float32, spans
from mpikv.codecs.powersgd_device import Factors
from mpikv.spaces.low_rank import FLOAT64, first_numbers, next_numbers, orthonormalize

_FACTOR = np.dtype("<f4")


@dataclass(frozen=True)
class PowerSGD(InBlocks):
    """Two factors. rank: how many columns they have. columns: c; 0: as the key's shape says it, or nearly square."""

    rank: int = 2
    columns: int = 0

    name = "powersgd"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", whole("powersgd: rank", self.rank, 1, 1 << 16))
        object.__setattr__(self, "columns", whole("powersgd: columns", self.columns, 0))

    @property
    def row_elems(self) -> int:
        """A row."""
        return self.columns or 1

    def for_shape(self, shape: tuple[int, ...]) -> PowerSGD:
        """With a row for each element of the first dimension, where the factors of all rows save something."""
        columns = math.prod(shape[1:])
        saves = len(shape) > 1 and self.rank * (shape[0] + columns) < math.prod(shape)
        return replace(self, columns=columns) if saves and not self.columns else self

    def _shape(self, n_elems: int) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        columns = self.columns or math.isqrt(max(n_elems - 1, 0)) + 1
        return -(-n_elems // columns), columns

    def matrix(self, n_elems: int) -> tuple[int, int] | None:
        """Return its rows and columns; None where its factors are no shorter than the values, which are sent then."""
        shape = self._shape(n_elems)
        return None if self.rank * sum(shape) >= n_elems else shape

    def on_device(self, dtype: np.dtype[Any]) -> Factors:
        """Multiplied and added there."""
        return Factors(dtype, False, self.rank, self.matrix)

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """Those of the factors, or of the values in float32."""
        shape = self.matrix(n_elems)
        return _FACTOR.itemsize * (n_elems if shape is None else self.rank * sum(shape))

    def init(self, n_elems: int) -> State:
        """Q begins with fixed numbers."""
        shape = self.matrix(n_elems)
        return {} if shape is None else {"q": first_numbers(shape[1], self.rank)}

    def encode(self, values: HostArray, state: State) -> HostArray:
        """One step of the iteration."""
        if (shape := self.matrix(values.size)) is None:
            return np.array(as_float32(values), _FACTOR).view(np.uint8)
        rows, columns = shape
        with np.errstate(all="ignore"):
            q = state["q"].astype(FLOAT64)
            p = np.empty((rows, self.rank))
            for part, matrix in _rows(values, rows, columns):
                np.matmul(matrix, q, out=p[part])
            orthonormalize(p, np.dot)
            sent_p = p.astype(_FACTOR)
            p = sent_p.astype(FLOAT64)
            q = np.zeros((columns, self.rank))
            for part, matrix in _rows(values, rows, columns):
                q += matrix.T @ p[part]
            sent_q = q.astype(_FACTOR)
        factors = np.concatenate([sent_p.reshape(-1), sent_q.reshape(-1)])
        next_numbers(factors, state["q"], sent_q)
        return factors.view(np.uint8)

    def blocks(self, data: HostArray, n_elems: int) -> Iterator[tuple[slice, HostArray]]:
        """Some rows of P Q^T at a time."""
        numbers = data.view(_FACTOR)
        if (shape := self.matrix(n_elems)) is None:
            yield slice(0, n_elems), numbers
            return
        rows, columns = shape
        p = numbers[: rows * self.rank].reshape(rows, self.rank)
        q = np.ascontiguousarray(numbers[rows * self.rank :].reshape(columns, self.rank).T, FLOAT32)
        with np.errstate(over="ignore", invalid="ignore"):
            for part in spans(rows, _rows_of_a_block(columns)):
                values = p[part, :1] * q[:1]
                for i in range(1, self.rank):
                    values += p[part, i : i + 1] * q[i : i + 1]
                where = slice(part.start * columns, min(part.stop * columns, n_elems))
                yield where, values.reshape(-1)[: where.stop - where.start]


def _rows_of_a_block(columns: int) -> int:
    return max(BLOCK_ELEMS // columns, 1)


def _rows(values: HostArray, rows: int, columns: int) -> Iterator[tuple[slice, HostArray]]:
    """Yield some rows of the matrix at a time, in float64."""
    for part in spans(rows, _rows_of_a_block(columns)):
        found = as_float32(values[part.start * columns : part.stop * columns])
        matrix = np.zeros((part.stop - part.start, columns))
        matrix.reshape(-1)[: found.size] = found
        yield part, matrix
