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


class Argument(NamedTuple):
    """An array of a program. first: the number of the value that is loaded from it, None where it is not read.

    single: it has one element, which counts for all elements of the others, and is only read: what a reduction found.
    bits: its elements are whole numbers of 1, 2 or 4 bits, side by side in bytes, the first one in the most significant
    bits of the first byte; the last byte is filled up with zeros. It is read or written, not both, and all such
    arguments of a program have as many bits. 0: they are whole.
    """

    dtype: np.dtype[Any]
    first: int | None
    last: int | None  # of the value that is stored there at the end, None where it is only read
    single: bool = False
    bits: int = 0

    def length(self, n_elems: int) -> int:
        """How many items of `dtype` the array has where a program runs on n elements."""
        return 1 if self.single else -(-n_elems * (self.bits or 8) // 8)


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

    def run(self, arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
        """Do it, with NumPy, in place. arrays: one for each argument, of `Argument.length`, maybe twice.

        The first argument is of whole elements.
        """
        n_elems = arrays[0].size
        values: list[Any] = [
            _apart(array, argument.bits)[:n_elems] if argument.bits else array.copy()
            for array, argument in zip(arrays, self.arguments, strict=True)
            if argument.first is not None
        ]
        values += [dtype.type(number) for dtype, number in zip(self.numbers, numbers, strict=True)]
        with np.errstate(all="ignore"):
            for operation in self.operations:
                values.append(_result(operation, [values[i] for i in operation.inputs]))
        for array, argument in zip(arrays, self.arguments, strict=True):
            if argument.last is not None:
                value = values[argument.last]
                array[...] = _side_by_side(value, argument.bits) if argument.bits else value


def _apart(packed: HostArray, bits: int) -> HostArray:
    """The elements of `bits` bits that bytes consist of."""
    places = np.arange(8 - bits, -1, -bits, dtype=np.uint8)
    elements: HostArray = packed[:, None] >> places & np.uint8(2**bits - 1)
    return elements.reshape(-1)


def _side_by_side(values: HostArray, bits: int) -> HostArray:
    """Bytes that consist of elements of `bits` bits."""
    places = np.arange(8 - bits, -1, -bits, dtype=np.uint8)
    filled = np.zeros(-(-values.size // places.size) * places.size, np.uint8)
    filled[: values.size] = values & np.uint8(2**bits - 1)
    packed: HostArray = np.bitwise_or.reduce(filled.reshape(-1, places.size) << places, axis=1)
    return packed


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
