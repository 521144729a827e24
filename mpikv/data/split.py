"""Splitting data: an epoch's examples over workers, and one batch over a worker's devices.

`SplitSampler` puts all examples of an epoch into one order that every part computes for itself, and part p of P
takes the places p, p+P, p+2P, ... of it. So nothing is sent, the parts never overlap, and step s of P parts with
batch B holds the same examples as step s of one part with batch P*B: a run can be checked against the same run on
one process.

The order is the sort order of 64-bit random numbers from PCG64, seeded by SeedSequence((seed, epoch)). NumPy
promises the raw stream of a bit generator for good, but not what `Generator.permutation` makes of it, and workers
with two versions of NumPy must still agree. Two equal numbers among n (chance n*n / 2**65) keep their places, the
sort being stable.

Cost of an epoch on every part: n random numbers and one sort, 24 n bytes while it lasts, and n / P indices (8 bytes
each) after it. Source of the generator: M. O'Neill, PCG, HMC-CS-2014-0905.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpikv.arrays.as_numpy import as_host
from mpikv.arrays.devices import Device, put, several
from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.data.following import Following
from mpikv.runtime.abort import tells

Last = Literal["uneven", "drop", "wrap"]
MOST_SLICES = 1_000_000  # far more than devices, few enough to be listed


def check_part(num_parts: int, part_index: int) -> tuple[int, int]:
    """Return both as ints. TypeError for what is no whole number, ValueError unless 0 <= part_index < num_parts."""
    num_parts = checks.whole("num_parts", num_parts, 1)
    part_index = checks.whole("part_index", part_index)
    if part_index >= num_parts:
        raise ValueError(f"part_index must be in 0..{num_parts - 1}, as num_parts is {num_parts}; got {part_index}")
    return num_parts, part_index


def bounds(n: int, num_parts: int, part_index: int) -> tuple[int, int]:
    """Return the begin and the end of a part of `n` consecutive examples: the rule of `numpy.array_split`."""
    whole, rest = divmod(n, num_parts)
    begin = whole * part_index + min(part_index, rest)
    return begin, begin + whole + (part_index < rest)


class SplitSampler:
    """The indices of one part of `range(length)`, in a new order in every epoch.

    length: number of examples, >= 0. num_parts >= 1, 0 <= part_index < num_parts: which part this is. shuffle: False
    takes the examples in the order they have. seed: >= 0, the same on every part.

    last: what becomes of the `length % num_parts` examples that do not divide. 'drop' leaves them to the next epoch,
    which shuffles all examples anew; `left` says which they are. 'uneven' gives one more to each of the first parts, so
    every example comes once per epoch. 'wrap' takes the first examples of the epoch's order a second time, until all
    parts are equally long. None is 'drop' where it shuffles, so that all workers train for equally many steps, and
    'uneven' where it does not, so that an evaluation sees every example once; fewer examples than parts are then a
    ValueError where it shuffles, since no part would ever have one.

    Works as `sampler=` of `torch.utils.data.DataLoader`. Iterating twice without `set_epoch` gives the same order
    twice: an epoch that advanced by itself would drift apart between parts of which one was iterated once more.
    Local, no messages. Raises TypeError for values that are no integers, ValueError for those out of range.

    >>> sampler = data.SplitSampler(10, num_parts=3, part_index=1, seed=7)
    >>> sampler.set_epoch(2)
    >>> list(sampler), len(sampler), sampler.indices().dtype, len(sampler.left)
    ([...], 3, dtype('int64'), 1)
    """

    @tells
    def __init__(
        self,
        length: int,
        num_parts: int = 1,
        part_index: int = 0,
        *,
        last: Last | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.length = checks.whole("length", length)
        self.num_parts, self.part_index = check_part(num_parts, part_index)
        self.seed = checks.whole("seed", seed, most=None)
        self.shuffle = checks.flag("shuffle", shuffle)
        if last is not None:
            checks.one_of("last", last, ("uneven", "drop", "wrap"))
        self.last: Last = last or ("drop" if self.shuffle else "uneven")
        if last is None and self.last == "drop" and 0 < self.length < self.num_parts:
            raise ValueError(
                f"{self.length} examples for {self.num_parts} parts: the default where it shuffles, last='drop', gives "
                "equally many to all, here none; last='wrap' repeats some, last='uneven' gives none to some parts"
            )
        self.epoch = 0
        self.start = 0
        self._following: Following | None = None  # where parts may become fewer, or more

    @classmethod
    def for_store(
        cls, length: int, store: Any, *, last: Last | None = None, shuffle: bool = True, seed: int = 0
    ) -> SplitSampler:
        """Make the sampler of this worker: part `store.rank` of `store.num_workers`. Local.

        Where workers go on without some that have died (MPIKV_ON_FAILURE=continue), an iteration goes on with an equal
        part of what nobody has drawn yet; where a spare takes the place of one, with the parts that there are.

        >>> list(data.SplitSampler.for_store(4, kv.create('local'), shuffle=False))
        [0, 1, 2, 3]
        """
        if not hasattr(store, "rank") or not hasattr(store, "num_workers"):
            raise checks.wrong("store", "a KVStore (anything with rank and num_workers)", store)
        made = cls(length, store.num_workers, store.rank, last=last, shuffle=shuffle, seed=seed)
        session = getattr(store, "session", None)
        if session is not None and session.continues:
            made._following = Following(made, session)
        return made

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the order of the next iteration; the same `epoch` (>= 0) and `start` on every part. Local.

        start: how many examples at the beginning of the epoch's order are left out (0 to `length`), because all parts
        together have had them already, maybe with another `num_parts`. The rest is split as a whole epoch is.

        >>> sampler = data.SplitSampler(4, shuffle=False)
        >>> sampler.set_epoch(1, start=3)
        >>> list(sampler)
        [3]
        """
        epoch, start = checks.whole("epoch", epoch, most=None), checks.whole("start", start, most=self.length)
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        whole, rest = divmod(self.length - self.start, self.num_parts)
        if self.last == "uneven":
            return whole + (self.part_index < rest)
        return whole + (self.last == "wrap" and rest > 0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist()) if self._following is None else self._following.drawing(self)

    def indices(self) -> NDArray[np.int64]:
        """Return this epoch's indices of this part at once: int64, (len(self),).

        >>> data.SplitSampler(5, 2, 0, shuffle=False).indices()
        array([0, 2, 4])
        """
        left = self.length - self.start
        if left == 0:
            return np.empty(0, dtype=np.int64)
        places = self.part_index + self.num_parts * np.arange(len(self), dtype=np.int64)
        # Places past the end exist with 'wrap' alone; modulo, as there may be more parts than examples.
        return self._order()[self.start + places % left]

    @property
    def left(self) -> NDArray[np.int64]:
        """The indices that no part has in this epoch, the end of its order: int64, fewer than `num_parts`.

        >>> data.SplitSampler(5, 2, 0, shuffle=False, last='drop').left
        array([4])
        """
        if self.last != "drop":
            return np.empty(0, dtype=np.int64)
        return self._order()[self.start + self.num_parts * len(self) :]

    def _order(self) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.length, dtype=np.int64)
        random = np.random.PCG64(np.random.SeedSequence((self.seed, self.epoch))).random_raw(self.length)
        return np.argsort(random, kind="stable").astype(np.int64, copy=False)

    def __repr__(self) -> str:
        return (
            f"SplitSampler({self.length}, {self.num_parts}, {self.part_index}, last={self.last!r}, "
            f"shuffle={self.shuffle}, seed={self.seed}), epoch {self.epoch}"
        )


def split_data(data: Any, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[Any]:
    """Cut `data` along `batch_axis` into `num_slice` slices, which are views where the array makes views. Local.

    data: an array (anything with `shape`, `dtype` and slicing, else `numpy.asarray` of it). With `even_split` the axis
    must divide (ValueError otherwise); without, the first slices get one more, as in `numpy.array_split`, and a slice
    may be empty.

    >>> data.split_data(np.arange(5), 2, even_split=False)
    [array([0, 1, 2]), array([3, 4])]
    """
    is_array = (
        isinstance(getattr(data, "shape", None), tuple) and hasattr(data, "dtype") and hasattr(data, "__getitem__")
    )
    array = data if is_array else as_host("data", data)  # else it can be cut as it is
    num_slice = checks.whole("num_slice", num_slice, 1, MOST_SLICES)
    checks.flag("even_split", even_split)
    num_axes = len(array.shape)
    axis = checks.whole("batch_axis", batch_axis, None, None)
    if not -num_axes <= axis < num_axes:
        raise ValueError(f"batch_axis {shown(axis)} is out of range for data of shape {tuple(array.shape)}")
    size = int(array.shape[axis])
    if even_split and size % num_slice:
        raise ValueError(
            f"{size} examples along axis {batch_axis} (data of shape {tuple(array.shape)}) do not divide into "
            f"{num_slice} equal slices; choose a batch size that is a multiple of {num_slice}, or pass even_split=False"
        )
    before = (slice(None),) * (axis % num_axes)
    places = [slice(*bounds(size, num_slice, i)) for i in range(num_slice)]
    return [array[before + (place,)] for place in places]  # noqa: RUF005 - not in Python 3.10


def split_and_load(
    data: Any, devices: Sequence[Device] | Device, batch_axis: int = 0, even_split: bool = True
) -> list[Any]:
    """Cut `data` as `split_data` does, and return the slices as arrays on the devices, one on each. Local.

    devices: 'cpu', 'cpu:0' (a NumPy array; a view where `data` already is host memory), 'gpu:0', 'cuda:0' or the
    device's number (a CuPy array there), or an object that prints itself like one of these. Raises what `split_data`
    raises, and UnsupportedError where a GPU is named and CuPy is missing.

    >>> data.split_and_load(np.arange(4), ['cpu:0', 'cpu:1'])
    [array([0, 1]), array([2, 3])]
    """
    listed = several(devices)
    return [put(s, d) for s, d in zip(split_data(data, len(listed), batch_axis, even_split), listed, strict=True)]
