"""`ArrayDataset`: arrays whose first axes belong together, or one part of them.

The arrays stay where they are: of memory-mapped ones only the rows of a batch are copied, so a worker's own memory does
not grow with the data set. (What Linux shows as resident counts mapped pages too, as long as nobody needs the memory.)

Part p of P of n examples is consecutive ones, and the first n % P parts are longer by one: the rule of
`numpy.array_split`, and of `SplitSampler` with 'uneven'. Each example is in one part; with fewer examples than parts
the last parts are empty.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpikv.common import checks
from mpikv.runtime.abort import tells


def check_part(num_parts: int, part_index: int) -> tuple[int, int]:
    """Return both as ints. TypeError for what is no whole number, ValueError unless 0 <= part_index < num_parts."""
    num_parts = checks.whole("num_parts", num_parts, 1)
    part_index = checks.whole("part_index", part_index)
    if part_index >= num_parts:
        raise ValueError(f"part_index must be in 0..{num_parts - 1}, as num_parts is {num_parts}; got {part_index}")
    return num_parts, part_index


def bounds(n: int, num_parts: int, part_index: int) -> tuple[int, int]:
    """Return the number of the part's first example, and of the one behind its last."""
    whole, rest = divmod(n, num_parts)
    begin = whole * part_index + min(part_index, rest)
    return begin, begin + whole + (part_index < rest)


class Rows:
    """Several arrays, one after another along their first axis, used as one without copying them together.

    So the five files of CIFAR-10's training images are one memory-mapped array.

    arrays: of the same shape but for the first axis, and of the same dtype. dtype: what the rows become when they are
    taken; None leaves theirs.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]], dtype: DTypeLike | None = None) -> None:
        # Without the class `memmap`, which every slice of it would have, too.
        self._arrays = [np.asarray(array) for array in arrays]
        self._starts = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        self._dtype = self._arrays[0].dtype if dtype is None else np.dtype(dtype)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows of these numbers: numbers (n,), 0 to length - 1; result (n, ...), in memory of its own."""
        if len(self._arrays) == 1:
            return self._arrays[0][numbers].astype(self._dtype, copy=False)
        found = np.empty((len(numbers), *self._arrays[0].shape[1:]), self._dtype)
        source = np.searchsorted(self._starts, numbers, side="right") - 1
        for number in np.unique(source):
            mine = source == number
            found[mine] = self._arrays[number][numbers[mine] - self._starts[number]]
        return found


class ArrayDataset:
    """Arrays whose first axes belong together: `dataset[i]` is the tuple of their rows i.

    Of a single array it is the row itself.

    arrays: one or more of equal length, (n, ...): NumPy arrays, memory maps, anything else that `numpy.asarray` takes.
    num_parts >= 1, 0 <= part_index < num_parts: take that part only, consecutive ones of the n rows; the first
    n % num_parts parts have one row more. Local. Raises ValueError where the lengths differ.

    >>> dataset = data.ArrayDataset(np.arange(6).reshape(3, 2), np.array([7, 8, 9]))
    >>> len(dataset), dataset.take([0, 2])
    (3, (array([[0, 1], [4, 5]]), array([7, 9])))
    """

    @tells
    def __init__(self, *arrays: Any, num_parts: int = 1, part_index: int = 0) -> None:
        if not arrays:
            raise ValueError("a data set is made of one array or more; none was given")
        self.num_parts, self.part_index = check_part(num_parts, part_index)
        rows = [array if isinstance(array, Rows) else _rows(array, i) for i, array in enumerate(arrays)]
        lengths = [len(one) for one in rows]
        if len(set(lengths)) > 1:
            raise ValueError(f"the arrays of a data set are equally long, not {', '.join(map(str, lengths))}")
        self._rows = rows
        self._begin, self._end = bounds(lengths[0], self.num_parts, self.part_index)

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, i: int) -> Any:
        number = checks.whole("the number of an example", i, None)
        found = tuple(array[0] for array in self._take(np.array([number])))
        return found if len(found) > 1 else found[0]

    def take(self, indices: Any) -> Any:
        """Return the batch of these examples. Local.

        It is a tuple of arrays (len(indices), ...), in memory of their own; of a single array, that array. Raises
        IndexError for an example that is not in the part.

        >>> data.ArrayDataset(np.arange(6) * 10).take([5, 0])
        array([50,  0])
        """
        found = self._take(np.asarray(indices, dtype=np.int64))
        return found if len(found) > 1 else found[0]

    def _take(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        n = len(self)
        outside = (indices < -n) | (indices >= n)
        if outside.any():
            where = "" if self.num_parts == 1 else f" in part {self.part_index} of {self.num_parts}"
            raise IndexError(f"example {indices[outside][0]} of {n}{where}")
        places = np.where(indices < 0, indices + n, indices) + self._begin
        return tuple(rows.take(places) for rows in self._rows)


def _rows(array: Any, number: int) -> Rows:
    if isinstance(array, str | bytes | os.PathLike):
        raise checks.wrong(
            f"array {number} of a data set", "an array (np.load, open_idx and the like read files)", array
        )
    found = array if isinstance(array, np.ndarray) else np.asarray(array)
    if found.ndim == 0 or found.dtype == object:
        raise checks.wrong(f"array {number} of a data set", "an array of one axis or more", array)
    return Rows([found])
