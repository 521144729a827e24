"""What a space is: one kind of memory that keys' arrays are in, and how they are worked on there.

A key's value, what is pushed to it and what becomes of that are flat arrays of the key's space. Whoever needs memory
for them, copies, casts, adds or updates them asks the space; a part of an array is a slice, as everywhere, and NumPy's
functions with `out=` work on arrays of one space (`np.add(a, b, out=c)`). What ranks send each other is host memory,
and so is what those of a host share (hostmemory/).

Arrays in host memory are NumPy's. Those of another space are of a class of its own, which has NumPy's `shape`, `dtype`,
`size`, `nbytes`, `itemsize`, `ndim`, `flags.c_contiguous`, `flags.writeable`, `reshape`, `view` and slices, and its
space as `space`. They come to the host only where somebody asks for that.

Every call is local. Which space a key is in all workers agree on (named.py); the spaces are each worker's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from mpikv.arrays import HostArray

SpaceArray = Any
"""An array of a space: NumPy's, or one of the space's own class."""

CallersArray = Any
"""An array of the caller's as `Space.callers` returns it."""

Formula = Callable[[SpaceArray, SpaceArray, Mapping[str, SpaceArray], "list[SpaceArray]"], None]
"""Changes a weight and the arrays of its state in place: (weight, gradient, arrays, temporaries)."""


class TracedFormula(ABC):
    """A formula that says what it hangs on, so that a space need not run it again to learn what it does."""

    @abstractmethod
    def __call__(
        self, w: SpaceArray, g: SpaceArray, arrays: Mapping[str, SpaceArray], tmp: list[SpaceArray], /
    ) -> None:
        """See `Formula`."""

    @abstractmethod
    def constants(self) -> Hashable | None:
        """What it is, but for the update's own values: two that are equal here do the same with equal values.

        None: it cannot be said.
        """

    @abstractmethod
    def values(self, names: Sequence[str]) -> Hashable | None:
        """The update's own values of these names; equal ones have equal bits. None: they cannot be compared."""

    @abstractmethod
    def noting(self) -> tuple[Formula, set[str]]:
        """The same formula, and the names of the values that it has looked at, once it has been run."""


class Space(Protocol):
    """One kind of memory. Arrays are (n,) and contiguous where nothing else is said."""

    @property
    def device(self) -> int | None:
        """The number of the GPU whose memory it is, among those that this process sees; None: host memory."""
        ...

    def settle(self) -> None:
        """Block until all that the store has begun is done. Memory that it reads or writes may be let go of then."""
        ...

    def stats(self) -> dict[str, int]:
        """What `store.stats()` says of it: copies between host and device."""
        ...

    def close(self) -> None:
        """Give all memory back; no array is of use then. Blocks until what was begun is done. Twice does nothing."""
        ...

    # --- between a caller's arrays, of any library, and this space

    def callers(self, arrays: Sequence[Any]) -> list[CallersArray]:
        """What a call knows of its arrays, for `total` now and `write` later, maybe in another thread.

        An array in host memory is returned itself. For one in device memory: an object of this space's that says where
        it is and how far the caller's own work on it, in this thread, has come by now.
        """
        ...

    def total(
        self, arrays: Sequence[CallersArray], what: str, *, on_device: bool, combine: np.ufunc = np.add
    ) -> SpaceArray:
        """The sum of one worker's arrays of a key, flat, in their dtype, in new memory of this space.

        See `arrays.sum_devices`. arrays: of `callers`, wherever they are. what: for errors.
        """
        ...

    def write(self, out: CallersArray, values: SpaceArray, what: str) -> None:
        """Copy values into an array of the caller's (of `callers`), of its own dtype and shape, wherever it is."""
        ...

    def empty_for_caller(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """New memory of any content that the caller works on: an array of this shape, which stays his own."""
        ...

    def in_place(self, array: CallersArray, what: str) -> SpaceArray | None:
        """A caller's array (of `callers`), flat, where it lies; None where it is elsewhere or has gaps.

        What is done with it from now on comes behind the caller's own work; `hand_back` ends it.
        """
        ...

    def lies_in(self, held: SpaceArray, array: CallersArray) -> bool:
        """Whether `held`, of an earlier `in_place`, lies in this array (of `callers`). If so it is as if new."""
        ...

    def hand_back(self, arrays: Sequence[CallersArray]) -> None:
        """Let what the caller does next with these arrays come behind what was done with them in place."""
        ...

    def lend(self, arrays: Sequence[SpaceArray]) -> AbstractContextManager[list[Any]]:
        """Arrays of this space as those of a library that users work with there, while the context lasts.

        For functions of the user's. Their work comes behind what the space has begun, and what the space does next
        behind theirs. Blocks until what has been begun is done.
        """
        ...

    # --- between the host and this space

    def to_host(self, array: SpaceArray) -> HostArray:
        """The values in host memory: a copy, or the same array where it is there. Blocks until they are there."""
        ...

    def from_host(self, values: HostArray) -> SpaceArray:
        """The values in this space: a copy, or the same array where it is in it. They may be changed afterwards."""
        ...

    # --- within it

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> SpaceArray:
        """New memory of any content."""
        ...

    def zeros(self, n_elems: int, dtype: np.dtype[Any]) -> SpaceArray:
        """New memory of zeros."""
        ...

    def copy(self, out: SpaceArray, values: SpaceArray | int) -> None:
        """Write values, of any dtype, into `out`, of the same length; or one number."""
        ...

    def cast(self, values: SpaceArray, dtype: np.dtype[Any]) -> SpaceArray:
        """The values in another dtype: a copy, or the same array where it has it already."""
        ...

    def combine(self, first: SpaceArray, second: SpaceArray, out: SpaceArray, how: np.ufunc) -> None:
        """Write `how(first, second)`, two arrays of one dtype, into `out`, which may be one of them."""
        ...

    def scale(self, values: SpaceArray, factor: float, out: SpaceArray) -> None:
        """Write the values, floating point numbers, times `factor` in their dtype into `out`."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Updates in the context, of different keys, may be made in any order, and begin when it ends."""
        ...

    def update(
        self,
        formula: Formula,
        weight: SpaceArray,
        terms: Sequence[SpaceArray],
        arrays: Mapping[str, SpaceArray],
        *,
        master: SpaceArray | None,
        dtype: np.dtype[Any],
        temporaries: int,
        elementwise: bool,
    ) -> None:
        """Run an optimizer's formula on a whole weight, with the sum of `terms` as its gradient.

        arrays: those of the state; master: the copy of the weight that the formula changes in its place, from which the
        weight is rounded. dtype: that of the formula's arithmetic. temporaries: how many arrays it needs. elementwise:
        whether it may be run on parts of the weight, one after another.
        """
        ...
