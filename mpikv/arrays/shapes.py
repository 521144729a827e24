"""The shapes that `store.empty` was asked for, and arrays of them side by side in one piece of memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpikv.common.checks import shown, wrong

Shape = tuple[int, ...]

MOST_BYTES = 2**47  # the addresses that a process has on today's machines
MOST_AXES = 32  # of NumPy 1


def is_list_of_shapes(shape: Any) -> bool:
    """Return whether several arrays are asked for: a list of tuples. A list of ints is one shape, as in NumPy."""
    return isinstance(shape, list) and all(isinstance(one, (tuple, list)) for one in shape)


def parse(shape: Any) -> list[Shape]:
    """Return the shapes asked for. Raises TypeError for what is no shape, ValueError for negative lengths."""
    found = []
    for one in shape if is_list_of_shapes(shape) else [shape]:
        numbers = one if isinstance(one, (tuple, list)) else (one,)
        for number in numbers:
            if not isinstance(number, (int, np.integer)) or isinstance(number, bool):
                raise wrong("a shape", "an int or a tuple of ints (or a list of such tuples)", shape)
            if number < 0:
                raise ValueError(f"a shape has no negative length, got {shown(one)}")
        if len(numbers) > MOST_AXES:
            raise ValueError(f"a shape has at most {MOST_AXES} lengths, got {len(numbers)}")
        found.append(tuple(int(number) for number in numbers))
    return found


def total_bytes(shapes: list[Shape], dtype: np.dtype[Any]) -> int:
    """Return how many bytes arrays of these shapes take together. ValueError for more than any machine has."""
    n_bytes = sum(map(math.prod, shapes)) * dtype.itemsize
    if n_bytes >= MOST_BYTES:
        raise ValueError(f"arrays of {shown(n_bytes)} bytes are more than any memory")
    return n_bytes


def arrays_in(memory: Any, shapes: list[Shape]) -> list[Any]:
    arrays, begin = [], 0
    for shape in shapes:
        end = begin + math.prod(shape)
        arrays.append(memory[begin:end].reshape(shape))
        begin = end
    return arrays
