"""`DataLoader`: batches of a data set as NumPy arrays, in a sampler's order, made ahead by a thread.

An epoch's order is the sampler's; its batches are taken from it one after another. So which examples a batch has is
known without loading any, and an epoch can be taken up in its middle: `state` says how many batches the loop has
had, and `load_state` goes on behind them without reading them again.

Words and the meaning of `last` are those of gluon's DataLoader (`last_batch` there). Memory: `prefetch` batches, one
more in the caller's hands, and 8 bytes for each example of the epoch.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpikv.common import checks
from mpikv.data.following import Following
from mpikv.data.split import SplitSampler
from mpikv.runtime.abort import tells

MOST_AHEAD = 1000  # batches


class _Arrays:
    """Arrays whose first axes belong together: an item is the tuple of their rows, of one array the row itself."""

    def __init__(self, *arrays: NDArray[Any]) -> None:
        # Without the class of a memory map, which every row of it would have, too.
        self._arrays = [np.asarray(array) for array in arrays]
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) > 1:
            raise ValueError(f"the arrays of a data set are equally long, not {', '.join(map(str, lengths))}")

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, i: Any) -> tuple[Any, ...]:
        return tuple(array[i] for array in self._arrays)

    take = __getitem__


class _Array(_Arrays):
    def __getitem__(self, i: Any) -> Any:
        return self._arrays[0][i]

    take = __getitem__


class DataLoader:
    """Batches of a data set: `for batch in loader` goes through one epoch.

    dataset: a NumPy array; a tuple of arrays of equal length, whose rows belong together; or anything with `len(d)` and
    `d[i]`, and maybe `d.take(indices)`, which makes a batch at once. Of memory-mapped arrays only the rows of a batch
    are copied. A batch is the rows of each array, what `take` gives, or the items stacked.

    batch_size >= 1. sampler: gives the indices of an epoch; it has `len`, and maybe `set_epoch`.
    By default the examples come in their order, or shuffled by `seed` and epoch (`shuffle=True`). last: what becomes of
    the examples left at the end of an epoch, fewer than batch_size: 'keep' makes a smaller batch of them, 'discard'
    leaves them out, 'rollover' puts them before those of the next epoch. prefetch: how many batches a thread loads
    ahead; 0 loads each in the caller when it is asked for. batchify_fn: makes a batch of the list of items
    `dataset[i]`, in the loading thread.

    Like the sampler's, an epoch does not advance by itself: call `set_epoch` before each. Local. What the data set
    raises while a batch is loaded is raised to whoever asks for that batch.

    >>> loader = data.DataLoader(np.arange(5), batch_size=2)
    >>> [batch.tolist() for batch in loader], len(loader)
    ([[0, 1], [2, 3], [4]], 3)
    """

    @tells
    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        sampler: Iterable[int] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        last: Literal["keep", "discard", "rollover"] = "keep",
        prefetch: int = 2,
        batchify_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._dataset: Any = dataset
        if isinstance(dataset, np.ndarray) and dataset.ndim:
            self._dataset = _Array(dataset)
        elif isinstance(dataset, tuple) and dataset and all(isinstance(array, np.ndarray) for array in dataset):
            self._dataset = _Arrays(*dataset)
        elif not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise checks.wrong("dataset", "a data set (with len and [i])", dataset)
        if sampler is not None and checks.flag("shuffle", shuffle):
            raise ValueError("shuffle=True is for a loader without a sampler; the sampler says the order")
        if sampler is not None and not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
            raise checks.wrong("sampler", "something to iterate over that has a length", sampler)
        self.batch_size = checks.whole("batch_size", batch_size, 1)
        self._sampler: Any = sampler
        if sampler is None:
            self._sampler = SplitSampler(len(self._dataset), last="uneven", shuffle=shuffle, seed=seed)
        self._following: Following | None = getattr(self._sampler, "_following", None)
        self.last = checks.one_of("last", last, ("keep", "discard", "rollover"))
        self._ahead = checks.whole("prefetch", prefetch, 0, MOST_AHEAD)
        self._batchify = batchify_fn
        self.epoch = 0
        self._start = 0
        self._batches = 0  # of this epoch that the loop has had
        self._resumed = False  # whether the next iteration goes on behind them
        self._before: list[int] = []  # what this epoch begins with, left over by an earlier one
        self._after: list[int] | None = None  # what this epoch left over, once it has come to its end
        self._running: object = None  # the iteration that was begun last: `state` speaks of it

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch of the next iteration; `start` as in `SplitSampler.set_epoch`. Local.

        After `load_state` the same epoch goes on where the state was taken, which may have had a `start` that need not
        be given again; any other one begins at its beginning.

        >>> loader = data.DataLoader(np.arange(5), batch_size=2, shuffle=True)
        >>> loader.set_epoch(1)
        >>> sorted(np.concatenate(list(loader)).tolist())
        [0, 1, 2, 3, 4]
        """
        epoch, start = checks.whole("epoch", epoch, most=None), checks.whole("start", start)
        if self._resumed and epoch == self.epoch and not start:
            start = self._start
        self._set_sampler(epoch, start)
        if (epoch, start) != (self.epoch, self._start):
            # An epoch that did not come to its end left nothing over.
            self._before, self._after = self._after or [], None
            self.epoch, self._start, self._resumed = epoch, start, False
        if not self._resumed:
            self._begin()

    def _set_sampler(self, epoch: int, start: int) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch, start) if start else self._sampler.set_epoch(epoch)
        elif start:
            raise ValueError(f"start={start} needs a sampler with set_epoch, as SplitSampler is")

    def _begin(self) -> None:
        if self._after is not None:
            self._before, self._after = self._after, None
        self._batches, self._resumed = 0, False

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, with what the last one left over."""
        return self._count(len(self._sampler) + len(self._before if self._after is None else self._after))

    def _count(self, examples: int) -> int:
        whole, rest = divmod(examples, self.batch_size)
        return whole + (rest > 0 and self.last == "keep")

    def state(self) -> dict[str, Any]:
        """Return where the loader is, as numbers, strings and lists that JSON or a checkpoint can keep. Local.

        Batches count when the loop gets them, not when they are loaded. The state belongs to this worker; where all
        workers take their examples by SplitSampler and `last` is not 'rollover', the state of one is good for all.

        >>> loader = data.DataLoader(np.arange(5), batch_size=2)
        >>> first = next(iter(loader))
        >>> loader.state()['batches']
        1
        """
        where = {"epoch": self.epoch, "start": self._start, "batches": self._batches, "before": list(self._before)}
        if self._following is not None:
            where |= self._following.place(self.epoch, self._batches * self.batch_size)
        return {**where, "of": self._identity()}

    def _identity(self) -> dict[str, Any]:
        """What must be the same in two loaders if a state of one is to mean the same in the other."""
        found: dict[str, Any] = {"batch_size": self.batch_size, "last": self.last}
        if isinstance(self._sampler, SplitSampler):
            found |= {name: getattr(self._sampler, name) for name in ("length", "num_parts", "seed", "shuffle")}
            found["last_of_parts"] = self._sampler.last
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the next iteration begins with the batch that would have come then. Local.

        A state of another number of parts of a SplitSampler is good, too: the epoch goes on with the examples that none
        of them has had. Raises ValueError, and changes nothing, for what is no state, or the state of a loader that
        makes other batches.

        >>> loader, other = (data.DataLoader(np.arange(5), batch_size=2) for _ in range(2))
        >>> first = next(iter(loader))
        >>> other.load_state(loader.state())
        >>> [batch.tolist() for batch in other]
        [[2, 3], [4]]
        """
        given = checks.options("state", state)
        if set(given) != set(self.state()):
            raise ValueError(f"state is none that a DataLoader gave: {checks.shown(state)}")
        mine, theirs = self._identity(), checks.options("state['of']", given["of"])
        other = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        if (moved := other == ["num_parts"] and not given["before"]) and self.last != "rollover":
            other = []
        if other:
            listed = ", ".join(f"{name} {checks.shown(theirs.get(name))} (here {mine.get(name)!r})" for name in other)
            raise ValueError(f"the state is of other batches than this loader makes: {listed}")
        epoch, start, batches = (
            checks.whole(f"state[{name!r}]", given[name], most=most)
            for name, most in (("epoch", None), ("start", checks.LARGEST), ("batches", checks.LARGEST))
        )
        if not isinstance(given["before"], list):
            raise checks.wrong("state['before']", "a list", given["before"])
        before = [checks.whole("an example in state['before']", i) for i in given["before"]]
        if before and max(before) >= len(self._dataset):
            raise ValueError(f"state['before'] has example {max(before)}, this data set has {len(self._dataset)}")
        if moved:
            had = batches * self.batch_size * checks.whole("num_parts of a state", theirs["num_parts"], 1)
            start, batches = min(start + had, self._sampler.length), 0
        self._set_sampler(epoch, start)
        self.epoch, self._start = epoch, start
        self._before, self._after = before, None
        self._batches, self._resumed = batches, True

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self._begin()
        self._resumed = False
        self._after = None
        if self._following is not None and self.last != "rollover":
            return self._epoch(self._drawn_batches(self._following), [])
        indices = self._sampler.indices() if isinstance(self._sampler, SplitSampler) else list(self._sampler)
        order = np.concatenate([np.array(part, dtype=np.int64) for part in (self._before, indices)])
        n_batches = self._count(len(order))
        if self._batches > n_batches:
            raise ValueError(f"{self._batches} batches of this epoch are done, but it has {n_batches}")
        cut = n_batches * self.batch_size
        left_over = order[cut:].tolist() if self.last == "rollover" else []
        begins = range(self._batches * self.batch_size, min(cut, len(order)), self.batch_size)
        return self._epoch([order[i : i + self.batch_size] for i in begins], left_over)

    def _drawn_batches(self, following: Following) -> Iterator[NDArray[np.int64]]:
        """The batches of an epoch whose examples may be split anew meanwhile: each is drawn when it is loaded."""
        self._batches = following.begin(self._sampler, self._batches * self.batch_size) // self.batch_size
        following.had = self._batches * self.batch_size
        drawing = iter(following.draw, None)
        while (batch := [*islice(drawing, self.batch_size)]) and (self.last == "keep" or len(batch) == self.batch_size):
            yield np.array(batch, np.int64)

    def _epoch(self, parts: Iterable[NDArray[np.int64]], left_over: list[int]) -> Iterator[Any]:
        self._running = running = object()
        for batch in _made_ahead(map(partial(partial, self._load), parts), self._ahead):
            if self._running is running:
                self._batches += 1
                if self._following is not None:
                    self._following.had = self._batches * self.batch_size
            yield batch
            del batch  # it is the caller's; here it would be kept until the next one has come
        if self._running is running:
            self._after = left_over

    def _load(self, indices: NDArray[np.int64]) -> Any:
        if self._batchify is None and hasattr(self._dataset, "take"):
            return self._dataset.take(indices)
        items = [self._dataset[i] for i in indices.tolist()]
        return (self._batchify or stack)(items)


def _made_ahead(loads: Iterator[Callable[[], Any]], ahead: int) -> Iterator[Any]:
    """What each of `loads` returns, of which a thread calls the next `ahead`. What one raises is raised in its place.

    The thread ends with the last value, with an error, and when the iterator is let go of (a loop that is left).
    """
    if not ahead:
        yield from (load() for load in loads)
        return
    pool, pid = ThreadPoolExecutor(1, "mpikv-prefetch"), os.getpid()
    try:
        waiting = deque[Future[Any]](map(pool.submit, islice(loads, ahead)))
        while waiting:
            if os.getpid() != pid:
                what = "batches are loaded by a thread of the process that was forked; iterate anew in this one"
                raise RuntimeError(what)
            batch = waiting.popleft().result()
            waiting.extend(map(pool.submit, islice(loads, 1)))
            yield batch
            del batch
    finally:
        pool.shutdown(cancel_futures=True)


def stack(items: list[Any]) -> Any:
    """Make a batch of items: tuples place by place, numbers and arrays as one array, everything else as a list."""
    first = items[0]
    if isinstance(first, tuple):
        if any(len(item) != len(first) for item in items):
            raise ValueError("items of different lengths cannot be a batch")
        return tuple(stack(list(column)) for column in zip(*items, strict=True))
    if isinstance(first, np.ndarray | np.generic | int | float | bool):
        arrays = [np.asarray(item) for item in items]
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) > 1:
            raise ValueError(
                f"arrays of shapes {shapes[0]} and {shapes[1]} cannot be one batch: bring them to one shape (for "
                "images, the transform of ImageRecords), or give batchify_fn"
            )
        return np.stack(arrays)
    return items
