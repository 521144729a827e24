"""A program: what is done to each element of some arrays, in one pass over them.

A program is a value, which knows no device: `run` does what it says with NumPy, on host memory; `source.py` writes it
in CUDA C++. `tracing.py` makes one of a function of NumPy arrays. Numbers (a learning rate) are not part of it: they
come beside it, in the order in which the function uses them, so that the program stays the same when they change.

Every operation is rounded to its dtype, as NumPy's is, and all those in `OPERATIONS` are exact or correctly rounded by
IEEE 754. So a device that rounds correctly and contracts nothing (no fused multiply-add) computes the same bits.

Cost: each array is read once, and written once if it has changed, however many operations there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays import HostArray
from mpikv.spaces.host import round_into

CAST, ROUND = "cast", "round"  # to another dtype: as NumPy casts; as `host.round_into` makes whole numbers
SELECT = "select"  # of three inputs: the second where the first is above 0, else the third
OPERATIONS: dict[str, np.ufunc] = {
    one.__name__: one
    for one in (
        np.add,
        np.subtract,
        np.multiply,
        np.divide,
        np.minimum,
        np.maximum,
        np.sqrt,
        np.negative,
        np.absolute,
        np.sign,
    )
}

Numbers = tuple[Any, ...]
"""The numbers of one run of a program, each a scalar of NumPy of the dtype that the program says."""

Entry = tuple[int, Sequence[int], Sequence[Any]]
"""One run of a program: how many elements, the addresses of its arrays, its numbers."""


class Layout(NamedTuple):
    """How the elements of an array lie in it, where there is not one item for each, one behind the other.

    bits: they are whole numbers of 1, 2 or 4 bits, side by side in bytes, the first one in the most significant bits of
    the first byte; the last byte is filled up with zeros. most: an item is the largest of so many elements, a power of
    2, or NaN where one of them is; it is only written. all: an item counts for all elements, and is only read. row: the
    array has rows of so many elements, each `step` items behind the one before; of `one` item for all of them, where
    that is set; such an item is only read, unless a row is one element.
    """

    bits: int = 0
    most: int = 0
    all: bool = False
    row: int = 0
    step: int = 0
    one: bool = False

    @property
    def share(self) -> int:
        """How many elements make an item."""
        return 8 // self.bits if self.bits else self.most or 1

    def length(self, n_elems: int) -> int:
        """How many items the array has, up to the last one that is used, where a program runs on n elements."""
        if self.row and n_elems:
            return (n_elems - 1) // self.row * self.step + (0 if self.one else (n_elems - 1) % self.row) + 1
        return 1 if self.all else -(-n_elems // self.share)

    def load(self, array: HostArray, n_elems: int) -> HostArray:
        """A copy of the elements; of one item for all of them where there is one."""
        if self.bits:
            places = np.arange(8 - self.bits, -1, -self.bits, dtype=np.uint8)
            elements: HostArray = array[:, None] >> places & np.uint8(2**self.bits - 1)
            return elements.reshape(-1)[:n_elems]
        return array[self._items(n_elems)] if self.row else array.copy()

    def store(self, values: Any, array: HostArray, n_elems: int) -> None:
        """Write the elements. values: an array of them, or one for all."""
        values = np.broadcast_to(values, n_elems)
        if self.bits:
            places = np.arange(8 - self.bits, -1, -self.bits, dtype=np.uint8)
            filled = np.zeros((array.size, places.size), np.uint8)
            filled.reshape(-1)[:n_elems] = values & np.uint8(2**self.bits - 1)
            array[...] = np.bitwise_or.reduce(filled << places, axis=1)
        elif self.most:
            array[...] = np.maximum.reduceat(values, range(0, n_elems, self.most)) if n_elems else array
        else:
            array[self._items(n_elems) if self.row else ...] = values

    def _items(self, n_elems: int) -> HostArray:
        places = np.arange(n_elems)
        items: HostArray = places // self.row * self.step + (0 if self.one else places % self.row)
        return items


DENSE = Layout()


class Argument(NamedTuple):
    """An array of a program. first: the number of the value that is loaded from it, None where it is not read."""

    dtype: np.dtype[Any]
    first: int | None
    last: int | None  # of the value that is stored there at the end, None where it is only read
    layout: Layout = DENSE


class Operation(NamedTuple):
    """One value, made of earlier ones, which have its dtype; or SELECT; or CAST or ROUND, from any dtype.

    name: in `OPERATIONS`, or one of these.
    """

    name: str
    dtype: np.dtype[Any]
    inputs: tuple[int, ...]


class Program(NamedTuple):
    """Values are numbered: first those loaded from arguments, in their order, then the numbers, then operations.

    Programs that are equal do the same.
    """

    arguments: tuple[Argument, ...]
    numbers: tuple[np.dtype[Any], ...]
    operations: tuple[Operation, ...]

    def dtypes(self) -> list[np.dtype[Any]]:
        """Those of all values."""
        loaded = [one.dtype for one in self.arguments if one.first is not None]
        return [*loaded, *self.numbers, *(one.dtype for one in self.operations)]

    def lengths(self, n_elems: int, numbers: Sequence[Any]) -> list[int]:
        """How many items each array has, where it runs on n elements."""
        return [argument.layout.length(n_elems) for argument in self.arguments]

    def run(self, arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
        """Do it, with NumPy, in place. arrays: one for each argument, of `lengths`, maybe twice.

        There are as many elements as the first has items.
        """
        n_elems = arrays[0].size
        values: list[Any] = [
            argument.layout.load(array, n_elems)
            for array, argument in zip(arrays, self.arguments, strict=True)
            if argument.first is not None
        ]
        values += [dtype.type(number) for dtype, number in zip(self.numbers, numbers, strict=True)]
        with np.errstate(all="ignore"):
            for operation in self.operations:
                values.append(_result(operation, [values[i] for i in operation.inputs]))
        for array, argument in zip(arrays, self.arguments, strict=True):
            if argument.last is not None:
                argument.layout.store(values[argument.last], array, n_elems)


def _result(operation: Operation, inputs: Sequence[Any]) -> Any:
    if operation.name == CAST:
        return np.asarray(inputs[0]).astype(operation.dtype)
    if operation.name == ROUND:
        rounded = np.empty(np.shape(inputs[0]), operation.dtype)
        round_into(rounded, np.array(inputs[0]))
        return rounded
    if operation.name == SELECT:
        return np.where(inputs[0] > 0, inputs[1], inputs[2])
    return OPERATIONS[operation.name](*inputs)
