"""Runs an optimizer's formula on a whole weight, block by block: dtype of the arithmetic, memory, rounding.

float64, int32 and int64 weights are updated in float64, which holds every int32 exactly and int64 up to 2^53; all
others (float16, bfloat16, float32, int8, uint8) in float32.

In host memory an elementwise formula is applied to blocks of the weight, which with their temporaries fit into the
cache, so that an update reads and writes memory once, however many NumPy calls its formula has. No result depends on
where blocks begin. On a GPU, where each NumPy call is a kernel, the block is the whole weight.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import SUPPORTED_DTYPES, HostArray, is_space_array
from mpikv.arrays.compiled import cast_into
from mpikv.spaces.base import SpaceArray

BLOCK_ELEMS = 32768  # Adam's seven blocks of it are under 1 MiB in float32: they fit a core's L2 cache
SMALL_BYTES, KEPT_BYTES = 1 << 14, 1 << 20
_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)
_WIDE = (_FLOAT64, np.dtype(np.int32), np.dtype(np.int64))

Formula = Callable[[SpaceArray, SpaceArray, Mapping[str, SpaceArray], "list[SpaceArray]"], None]
"""Changes a weight and the arrays of its state in place: (weight, gradient, arrays, temporaries)."""


def work_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that an update of weights of `dtype` calculates in."""
    return _FLOAT64 if dtype in _WIDE else _FLOAT32


def check_array(owner: str, what: str, array: Any) -> None:
    """Raise TypeError for anything but an array of a space (NumPy's in host memory) of a supported dtype."""
    if not is_space_array(array):
        raise TypeError(f"{owner}: {what} is a NumPy array, not {type(array).__name__}")
    if array.dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
        raise TypeError(f"{owner}: {what} has dtype {array.dtype}; supported are {names}")


class Scratch:
    """An optimizer's memory for temporaries, kept from one update to the next, for threads that may share it.

    Memory of SMALL_BYTES to KEPT_BYTES that is freed after each update may be allocated as new pages each time
    (M_MMAP_THRESHOLD in mallopt(3)), whose page faults take as long as the arithmetic. Other lengths are not kept.
    """

    def __init__(self) -> None:
        self._kept: list[HostArray] = []

    def __reduce__(self) -> Any:
        """Pickle and copy it as a new, empty one."""
        return Scratch, ()

    def take(self, n_bytes: int) -> HostArray:
        """Return (n_bytes or more,) of uint8, uninitialised, which is not returned again until `give` gets it back."""
        if SMALL_BYTES <= n_bytes <= KEPT_BYTES:
            try:
                kept = self._kept.pop()
            except IndexError:
                pass
            else:
                if kept.size >= n_bytes:
                    return kept
        return np.empty(n_bytes, np.uint8)

    def give(self, memory: HostArray) -> None:
        """Keep memory that `take` returned. As many arrays are kept as updates were under way at once."""
        if SMALL_BYTES <= memory.size <= KEPT_BYTES:
            self._kept.append(memory)


def run(
    formula: Formula,
    weight: SpaceArray,
    terms: Sequence[SpaceArray],
    arrays: Mapping[str, SpaceArray],
    scratch: Scratch,
    *,
    master: SpaceArray | None,
    dtype: np.dtype[Any],
    temporaries: int,
    elementwise: bool,
) -> None:
    """Run an optimizer's formula on a whole weight, with the sum of `terms` as its gradient.

    master: the copy of the weight that the formula changes, and from which the weight is rounded; None: the weight is
    changed itself. dtype: of the arithmetic. Terms are added block by block, so that the sum is used while it is in the
    cache, and never written to memory.
    """
    if not isinstance(weight, np.ndarray):
        if weight.size:
            w = weight if weight.dtype == dtype else weight.astype(dtype) if master is None else master
            g = functools.reduce(operator.add, terms).astype(dtype, copy=False)
            formula(w, g, arrays, [np.empty_like(weight, dtype=dtype) for _ in range(temporaries)])
            if w is not weight:
                round_into(weight, w)
        return
    n, term_dtype = weight.size, terms[0].dtype
    # Blocks of a formula with few arrays can be longer, so that there are fewer of them.
    longer = max(1, 6 // (2 + len(arrays) + temporaries))
    length = min(n, BLOCK_ELEMS * longer) if elementwise else n
    if length == 0:
        return
    converts = 2 if weight.dtype != dtype or term_dtype != dtype else 0
    rows = temporaries + converts
    n_bytes = rows * length * dtype.itemsize
    sum_at = -(-n_bytes // 8) * 8  # aligned for any dtype
    memory = scratch.take(sum_at + (length * term_dtype.itemsize if len(terms) > 1 else 0))
    buffers = memory[:n_bytes].view(dtype).reshape(rows, length)
    for begin in range(0, n, length):
        block = slice(begin, min(begin + length, n))
        size = block.stop - begin
        stored, g = weight[block], terms[0][block]
        w = stored if stored.dtype == dtype else buffers[-1, :size] if master is None else master[block]
        if master is None and w is not stored:
            np.copyto(w, stored, casting="unsafe")
        for term in terms[1:]:
            g = np.add(g, term[block], out=memory[sum_at : sum_at + size * term_dtype.itemsize].view(term_dtype))
        if term_dtype != dtype:
            np.copyto(buffers[-2, :size], g, casting="unsafe")
            g = buffers[-2, :size]
        blocks = {name: array[block] for name, array in arrays.items()}
        formula(w, g, blocks, [buffers[i, :size] for i in range(temporaries)])
        if w is not stored:
            round_into(stored, w)
    scratch.give(memory)


def round_into(out: SpaceArray, values: SpaceArray) -> None:
    """Write `values` into `out`, each rounded once to its dtype.

    To integers: to nearest, halves to even, limited to the range, NaN to 0; `values` serves as scratch then.
    """
    if out.dtype.kind in "iu":
        limits, real = np.iinfo(out.dtype), values.dtype.type
        # 2^63 - 1 is no float64, and would be rounded to 2^63, which int64 cannot hold; so the float below is taken.
        high = np.nextafter(real(2.0**63), real(0.0)) if out.dtype == np.int64 else real(limits.max)
        np.rint(values, out=values)
        np.maximum(values, real(limits.min), out=values)
        np.minimum(values, high, out=values)
        np.copyto(values, real(0.0), where=np.isnan(values))
    if isinstance(out, np.ndarray):
        cast_into(out, values)
    else:
        np.copyto(out, values, casting="unsafe")
