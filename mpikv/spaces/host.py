"""Host memory: NumPy arrays, and everything is done when a call returns.

How an update runs. An elementwise formula is applied to blocks of the weight that stay in the cache with their
temporaries, so that an update reads and writes memory once, however many NumPy calls its formula has; no result depends
on where blocks begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpikv.arrays import HostArray, host_view, is_elsewhere, sum_devices, write
from mpikv.compiled import cast_into
from mpikv.spaces.base import Formula
from mpikv.spaces.scratch import Scratch

BLOCK_ELEMS = 32768  # Adam's seven blocks of it are under 1 MiB in float32: they fit a core's L2 cache


class HostSpace:
    """Memory of this process. Pickled or copied: a new one, which holds nothing."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __reduce__(self) -> Any:
        return HostSpace, ()

    @property
    def device(self) -> None:
        """See `Space`."""

    def settle(self) -> None:
        """It is."""

    def stats(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing: arrays live as long as somebody has them."""

    def callers(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays themselves: what is written into host memory is there, and a device array waits for its work."""
        return list(arrays)

    def total(self, arrays: Sequence[Any], what: str, *, on_device: bool, combine: np.ufunc = np.add) -> HostArray:
        """See `Space`; device arrays come to the host."""
        return sum_devices(arrays, what, on_device=on_device, combine=combine)

    def write(self, out: Any, values: HostArray, what: str) -> None:
        """See `Space`."""
        write(out, values, what)

    def empty_for_caller(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
        """See `Space`."""
        return np.empty(shape, dtype)

    def in_place(self, array: Any, what: str) -> HostArray | None:
        """See `Space`."""
        view = host_view(array, what)
        flat: HostArray = view.reshape(-1)
        if view is array and view.flags.c_contiguous:  # as nearly all are
            return flat
        return flat if not is_elsewhere(array) and np.may_share_memory(flat, view) else None

    def lies_in(self, held: HostArray, array: Any) -> bool:
        """See `Space`. `held` has no gaps, so that comparing bounds is exact."""
        if not isinstance(array, np.ndarray):
            if is_elsewhere(array):
                return False
            array = host_view(array, "an array")
        return np.may_share_memory(held, array)

    def hand_back(self, arrays: Sequence[Any]) -> None:
        """Nothing: all is done."""

    def lend(self, arrays: Sequence[HostArray]) -> AbstractContextManager[list[Any]]:
        """The arrays themselves."""
        return nullcontext(list(arrays))

    def to_host(self, array: HostArray) -> HostArray:
        """The array itself."""
        return array

    def from_host(self, values: HostArray) -> HostArray:
        """The array itself."""
        return values

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """See `Space`."""
        return np.empty(n_elems, dtype)

    def zeros(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """See `Space`."""
        return np.zeros(n_elems, dtype)

    def copy(self, out: HostArray, values: HostArray | int) -> None:
        """See `Space`."""
        if getattr(values, "dtype", None) == out.dtype:
            np.copyto(out, values)
        else:
            cast_into(out, values)

    def cast(self, values: HostArray, dtype: np.dtype[Any]) -> HostArray:
        """See `Space`."""
        if values.dtype == dtype:
            return values
        out: HostArray = np.empty(values.shape, dtype)
        cast_into(out, values)
        return out

    def combine(self, first: HostArray, second: HostArray, out: HostArray, how: np.ufunc) -> None:
        """See `Space`."""
        how(first, second, out=out)

    def scale(self, values: HostArray, factor: float, out: HostArray) -> None:
        """See `Space`."""
        np.multiply(values, values.dtype.type(factor), out=out)

    def together(self) -> AbstractContextManager[None]:
        """Nothing: each is made as it comes."""
        return nullcontext()

    def update(
        self,
        formula: Formula,
        weight: HostArray,
        terms: Sequence[HostArray],
        arrays: Mapping[str, HostArray],
        *,
        master: HostArray | None,
        dtype: np.dtype[Any],
        temporaries: int,
        elementwise: bool,
    ) -> None:
        """See `Space`. Terms are added block by block: the sum is in the cache when it is used, and nowhere else."""
        n, term_dtype = weight.size, terms[0].dtype
        # A formula of few arrays has room for longer blocks, of which there are fewer.
        longer = max(1, 6 // (2 + len(arrays) + temporaries))
        length = min(n, BLOCK_ELEMS * longer) if elementwise else n
        if length == 0:
            return
        converts = 2 if weight.dtype != dtype or term_dtype != dtype else 0
        rows = temporaries + converts
        n_bytes = rows * length * dtype.itemsize
        sum_at = -(-n_bytes // 8) * 8  # aligned for any dtype
        memory = self._scratch.take(sum_at + (length * term_dtype.itemsize if len(terms) > 1 else 0))
        buffers = memory[:n_bytes].view(dtype).reshape(rows, length)
        for begin in range(0, n, length):
            here = slice(begin, min(begin + length, n))
            size = here.stop - begin
            stored, g = weight[here], terms[0][here]
            w = stored if stored.dtype == dtype else buffers[-1, :size] if master is None else master[here]
            if master is None and w is not stored:
                np.copyto(w, stored, casting="unsafe")
            for term in terms[1:]:
                g = np.add(g, term[here], out=memory[sum_at : sum_at + size * term_dtype.itemsize].view(term_dtype))
            if term_dtype != dtype:
                np.copyto(buffers[-2, :size], g, casting="unsafe")
                g = buffers[-2, :size]
            blocks = {name: array[here] for name, array in arrays.items()}
            formula(w, g, blocks, [buffers[i, :size] for i in range(temporaries)])
            if w is not stored:
                round_into(stored, w)
        self._scratch.give(memory)


def round_into(out: HostArray, values: HostArray) -> None:
    """Write `values` into `out`, each rounded once to its dtype.

    To integers: to nearest, halves to even, limited to the range, NaN to 0; `values` serves as scratch then.
    """
    if out.dtype.kind in "iu":
        limits, real = np.iinfo(out.dtype), values.dtype.type
        # 2^63 - 1 is no float64 and would become 2^63, which int64 does not hold: take the float below.
        high = np.nextafter(real(2.0**63), real(0.0)) if out.dtype == np.int64 else real(limits.max)
        np.rint(values, out=values)
        np.maximum(values, real(limits.min), out=values)
        np.minimum(values, high, out=values)
        values[np.isnan(values)] = 0.0
    cast_into(out, values)
