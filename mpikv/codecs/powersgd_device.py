"""The codec powersgd in device memory: one step of its iteration, tile by tile of the matrix.

The formulas of powersgd.py. Sums are of float64, in an order of their own: a factor differs from the host's where
rounding it to float32 hangs on that order, which is seldom. What decodes the factors has the host's bits. Q stays on
the GPU.

Cost: two passes over the values to encode, and one to find what is left; ten launches for all pieces of a push, or more
where they have more than some sixty tiles. Memory: the factors in float64, once for each `SEGMENT` of rows or columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mpikv.codecs.on_device import FLOAT32, Elements, OnDevice, Pushed, totals
from mpikv.spaces import low_rank
from mpikv.spaces.low_rank import FLOAT64

if TYPE_CHECKING:
    from mpikv.spaces.device import DeviceSpace
    from mpikv.spaces.device_array import DeviceArray

SEGMENT = 1024  # products that one thread adds, one behind the other
TILE_ELEMS = 512  # sums of one block, some for each of its threads
BLOCK_ELEMS = 1 << 16  # values that one block makes of factors

Runs = list[tuple[list[Any], list[int]]]


@dataclass(frozen=True)
class Matrix:
    """A piece that is encoded. values: float32. factors: where P and Q travel, P first; q: of the push before."""

    values: DeviceArray
    factors: DeviceArray
    q: DeviceArray
    rows: int
    columns: int
    rank: int

    def tiles(self, *, height: int, width: int) -> Iterator[tuple[int, int, int, int, DeviceArray]]:
        """Tiles of so many rows and columns, those at the ends less: row, column, height, width, values from there."""
        for row in range(0, self.rows, height):
            for column in range(0, self.columns, width):
                size = min(height, self.rows - row), min(width, self.columns - column)
                yield row, column, *size, self.values[row * self.columns + column :]


@dataclass(frozen=True)
class Factors(OnDevice):
    """See `OnDevice`. rank: of the codec. shape: rows and columns of n values; None: they are sent as they are."""

    rank: int
    shape: Callable[[int], tuple[int, int] | None]

    kept = ("residual", "q")

    @cached_property
    def _whole(self) -> Elements:
        """Of pieces that are sent as they are."""
        return Elements(self.dtype, self.remembers, FLOAT32, lambda v: v.astype(FLOAT32, copy=False), lambda data: data)

    def encode(self, space: DeviceSpace, pieces: Sequence[Pushed]) -> None:
        """See `OnDevice`."""
        shapes = [self.shape(one.values.size) for one in pieces]
        self._whole.encode(space, [one for one, shape in zip(pieces, shapes, strict=True) if shape is None])
        found = [(one, shape) for one, shape in zip(pieces, shapes, strict=True) if shape is not None]
        if self.remembers:
            program, numbers = totals(self.dtype)
            space.launch_many(program, [([one.residual, one.values], numbers) for one, _ in found])
        matrices = [
            Matrix(
                one.residual if self.remembers else space.cast(one.values, FLOAT32),
                one.data.view(FLOAT32),
                one.state["q"].reshape(-1),
                *shape,
                self.rank,
            )
            for one, shape in found
        ]
        self._iterate(space, matrices)
        if self.remembers:
            expanded = [self._expanded(one.values, one.factors, one.rows, one.columns) for one in matrices]
            runs = [run for runs in expanded for run in runs]
            space.launch_many(low_rank.expand(FLOAT32, "left"), runs)

    def _iterate(self, space: DeviceSpace, matrices: Sequence[Matrix]) -> None:
        """Write the factors of each, and the Q of its next push."""
        r = self.rank
        high = max(TILE_ELEMS // r, 1)
        of_rows = _zeros(space, [-(-one.columns // SEGMENT) * one.rows * r for one in matrices])
        of_columns = _zeros(space, [-(-one.rows // SEGMENT) * one.columns * r for one in matrices])
        p = [space.empty(one.rows * r, FLOAT64) for one in matrices]
        runs: Runs = []
        for one, sums in zip(matrices, of_rows, strict=True):
            for row, column, height, width, values in one.tiles(height=high, width=SEGMENT):
                begin = (column // SEGMENT * one.rows + row) * r
                q = one.q[column * r : (column + width) * r]
                runs.append(([values, q, sums[begin : begin + height * r]], [one.columns, r, width, height]))
        space.launch_many(low_rank.PRODUCTS, runs)
        runs = [run for out, sums in zip(p, of_rows, strict=True) for run in _folds(out, sums)]
        space.launch_many(low_rank.fold(FLOAT64), runs)
        sent = [([found, one.factors[: one.rows * r]], [r]) for one, found in zip(matrices, p, strict=True)]
        space.launch_many(low_rank.ORTHONORMALIZE, sent)
        runs = []
        for one, sums, found in zip(matrices, of_columns, p, strict=True):
            for row, column, height, width, values in one.tiles(height=SEGMENT, width=high):
                begin = (row // SEGMENT * one.columns + column) * r
                part = found[row * r : (row + height) * r]
                runs.append(([values, part, sums[begin : begin + width * r]], [one.columns, r, width, height]))
        space.launch_many(low_rank.PRODUCTS_OF_COLUMNS, runs)
        runs = []
        for one, sums in zip(matrices, of_columns, strict=True):
            runs += _folds(one.factors[one.rows * r :], sums)
        space.launch_many(low_rank.fold(FLOAT32), runs)
        space.launch_many(low_rank.AGAIN, [([one.factors, one.q], [one.columns, r]) for one in matrices])

    def decode(self, space: DeviceSpace, data: DeviceArray, out: DeviceArray, *, add: bool) -> None:
        """See `OnDevice`."""
        shape = self.shape(out.size)
        if shape is None:
            self._whole.decode(space, data, out, add=add)
            return
        routine = low_rank.expand(out.dtype, "add" if add else "write")
        space.launch_many(routine, list(self._expanded(out, data.view(FLOAT32), *shape)))

    def _expanded(self, out: DeviceArray, factors: DeviceArray, rows: int, columns: int) -> Runs:
        """The runs of `low_rank.expand`: some rows each."""
        r = self.rank
        q, at_once = factors[rows * r :], max(BLOCK_ELEMS // columns, 1)
        return [
            (
                [out[row * columns : min((row + at_once) * columns, out.size)], factors[row * r :][: at_once * r], q],
                [columns, r],
            )
            for row in range(0, rows, at_once)
        ]


def _zeros(space: DeviceSpace, sizes: Sequence[int]) -> list[DeviceArray]:
    """Arrays for sums: zeros, since no run makes those of a tile that lies behind all values."""
    together, ends = space.zeros(sum(sizes), FLOAT64), accumulate(sizes)
    return [together[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _folds(out: DeviceArray, sums: DeviceArray) -> Runs:
    """The runs of `low_rank.fold`: some elements each."""
    n = out.size
    return [([out[begin : begin + TILE_ELEMS], sums[begin:]], [sums.size // n, n]) for begin in range(0, n, TILE_ELEMS)]
