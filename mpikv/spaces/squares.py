"""Sums of squares of arrays, in float64: in device memory with the bits that the host finds.

An array is taken in parts of 65536 elements, whose squares NumPy adds in pairs: 512 runs of 128, each in eight lanes of
16 values, and then lanes and runs by twos, neighbours first. On a GPU the same additions are made, those of many parts
at once: the squares are laid out so that what is to be added lies in two halves of one array. The last steps, of 64
values for each part, and what is left of an array behind its last whole part are added on the host.

Cost: arrays are read once; about 30 launches for 4 million elements; to the host come 512 bytes for each 65536
elements, and the rest of each array, in two copies (one more for each further dtype).
Source: NumPy, numpy/_core/src/umath/loops_utils.h.src (pairwise_sum).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpikv.arrays import HostArray
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.device_array import DeviceArray

PART_ELEMS = 1 << 16
PARTS = 64  # worked on at once: 32 MiB of float64, twice
LANES, RUN = 8, 128
STEPS = RUN // LANES
HALVINGS = 6  # of lanes (3) and of neighbouring runs: as many as a copy has dimensions for
LEFT = PART_ELEMS // STEPS >> HALVINGS  # values for each part that the host adds
FLOAT64 = np.dtype(np.float64)


def on_host(array: HostArray) -> list[float]:
    """The sums of the squares of an array's parts, of `PART_ELEMS` elements: half a megabyte stays in the cache."""
    flat = array.reshape(-1)
    found = []
    for begin in range(0, flat.size, PART_ELEMS):
        part = flat[begin : begin + PART_ELEMS].astype(np.float64)
        found.append(float(np.sum(np.multiply(part, part, out=part))))
    return found


def sums_of_squares(space: DeviceSpace, arrays: Sequence[DeviceArray]) -> list[list[float]]:
    """For each flat array: the sums of the squares of its parts, of `PART_ELEMS` elements, in float64. Blocks."""
    whole = [array.size // PART_ELEMS for array in arrays]
    parts = [(array, i) for array, n in zip(arrays, whole, strict=True) for i in range(n)]
    sums = [part for begin in range(0, len(parts), PARTS) for part in _of_parts(space, parts[begin : begin + PARTS])]
    found = []
    tails = _tails(space, [array[n * PART_ELEMS :] for array, n in zip(arrays, whole, strict=True)])
    for n, tail in zip(whole, tails, strict=True):
        found.append([*sums[:n], *on_host(tail)])
        del sums[:n]
    return found


def _of_parts(space: DeviceSpace, parts: Sequence[tuple[DeviceArray, int]]) -> list[float]:
    n = len(parts)
    squares = space.empty(n * PART_ELEMS, FLOAT64)
    for at, (array, i) in enumerate(parts):
        space.copy(squares[at * PART_ELEMS : (at + 1) * PART_ELEMS], array[i * PART_ELEMS : (i + 1) * PART_ELEMS])
    space.combine(squares, squares, squares, np.multiply)
    runs = n * PART_ELEMS // RUN
    # Axes of the source: groups of 8 runs, a run's place in its group (3 bits), step, lane (3 bits). Those that are
    # halved first come first, behind the steps.
    lengths = (runs // 8, 2, 2, 2, STEPS, 2, 2, 2)
    order = (4, 7, 6, 5, 3, 2, 1, 0)
    strides = _strides(lengths)
    shape = tuple(lengths[axis] for axis in order)
    laid = space.empty(squares.size, FLOAT64)
    space.copy_strided(laid, squares, shape, tuple(strides[axis] for axis in order))
    row = laid.size // STEPS
    total = laid[:row]
    for step in range(1, STEPS):
        space.combine(total, laid[step * row : (step + 1) * row], total, np.add)
    for _ in range(HALVINGS):
        half = total.size // 2
        space.combine(total[:half], total[half:], total[:half], np.add)
        total = total[:half]
    values = space.to_host(total).reshape(n, LEFT)
    while values.shape[1] > 1:
        values = values[:, ::2] + values[:, 1::2]
    return [float(value) for value in values[:, 0]]


def _strides(lengths: Sequence[int]) -> list[int]:
    steps = [FLOAT64.itemsize]
    for length in reversed(lengths[1:]):
        steps.append(steps[-1] * length)
    return steps[::-1]


def _tails(space: DeviceSpace, tails: Sequence[DeviceArray]) -> list[HostArray]:
    """Short arrays in host memory, in one copy for each dtype."""
    found: list[HostArray] = [np.empty(0)] * len(tails)
    for dtype in dict.fromkeys(tail.dtype for tail in tails):
        chosen = [i for i, tail in enumerate(tails) if tail.dtype == dtype]
        ends = np.cumsum([tails[i].size for i in chosen])
        together = space.empty(int(ends[-1]), dtype)
        for i, end in zip(chosen, ends, strict=True):
            space.copy(together[int(end) - tails[i].size : int(end)], tails[i])
        on_host = space.to_host(together)
        for i, end in zip(chosen, ends, strict=True):
            found[i] = on_host[int(end) - tails[i].size : int(end)]
    return found
