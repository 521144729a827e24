"""A program: what is done to each element of some arrays, in one pass over them.

`trace` runs a function of NumPy arrays on arrays that only note what is done with them. So the formula of an optimizer,
written for NumPy, becomes a program as it is: each array is read once, and written once if it has changed, however many
calls the formula has. A program is a value, which knows no device: `run` does what it says with NumPy, on host memory;
`source.py` writes it in CUDA C++.

Every operation is rounded to its dtype, as NumPy's is. So a device that rounds correctly and contracts nothing (no
fused multiply-add) computes the same bits: all operations in `OPERATIONS` are exactly rounded by IEEE 754.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays import HostArray

CAST, ROUND = "cast", "round"  # to another dtype: as NumPy casts; to the nearest whole number, within the limits
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


class Argument(NamedTuple):
    """An array of a program. first: the number of the value that is loaded from it, None where it is only written."""

    dtype: np.dtype[Any]
    first: int | None
    last: int | None  # of the value that is stored there at the end, None where it is only read


class Operation(NamedTuple):
    """One value, made of earlier ones. name: in `OPERATIONS`, or CAST or ROUND."""

    name: str
    dtype: np.dtype[Any]
    inputs: tuple[int, ...]


class Program(NamedTuple):
    """Values are numbered: first those loaded from arguments, in their order, then the numbers, then operations."""

    arguments: tuple[Argument, ...]
    numbers: tuple[np.dtype[Any], ...]
    operations: tuple[Operation, ...]

    def run(self, arrays: Sequence[HostArray], numbers: Sequence[Any]) -> None:
        """Do it, with NumPy, in place. arrays: (n,) each, one for each argument."""
        values: list[Any] = [
            array.copy() for array, argument in zip(arrays, self.arguments, strict=True) if argument.first is not None
        ]
        values += [dtype.type(number) for dtype, number in zip(self.numbers, numbers, strict=True)]
        with np.errstate(all="ignore"):
            for operation in self.operations:
                values.append(_result(operation, [values[i] for i in operation.inputs]))
        for array, argument in zip(arrays, self.arguments, strict=True):
            if argument.last is not None:
                array[...] = values[argument.last]


def _result(operation: Operation, inputs: Sequence[Any]) -> Any:
    if operation.name == CAST:
        return np.asarray(inputs[0]).astype(operation.dtype)
    if operation.name == ROUND:
        raise NotImplementedError
    return OPERATIONS[operation.name](*inputs)


class NotAProgram(Exception):  # noqa: N818 - says what the function is
    """A function does what no program can hold."""


def fill(dtype: np.dtype[Any]) -> Program:
    """Write one number into an array."""
    return Program((Argument(dtype, None, 0),), (dtype,), ())


def copy_program(source: np.dtype[Any], to: np.dtype[Any]) -> Program:
    """Write an array into another one of another dtype."""
    return Program((Argument(source, 0, None), Argument(to, None, 1)), (), (Operation(CAST, to, (0,)),))


def combine(how: np.ufunc, dtype: np.dtype[Any]) -> Program:
    """Two arrays into a third, which may be one of them."""
    arguments = Argument(dtype, 0, None), Argument(dtype, 1, None), Argument(dtype, None, 2)
    return Program(arguments, (), (Operation(how.__name__, dtype, (0, 1)),))


def scale(dtype: np.dtype[Any]) -> Program:
    """An array times a number into another one, which may be the same."""
    arguments = Argument(dtype, 0, None), Argument(dtype, None, 2)
    return Program(arguments, (dtype,), (Operation("multiply", dtype, (0, 1)),))


def divide(dtype: np.dtype[Any]) -> Program:
    """An array divided by a number into another one, which may be the same."""
    arguments = Argument(dtype, 0, None), Argument(dtype, None, 2)
    return Program(arguments, (dtype,), (Operation("divide", dtype, (0, 1)),))
