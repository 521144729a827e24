"""The two halves of an allreduce between ranks that are all on one host, through the memory that they share.

Each rank makes its values readable, row by row: a row is a segment of every owner's part. An owner adds its part, row
by row, once all ranks have filled the row, in the order of the ranks: the same bits as `naive` and as calls that all
ranks make together (shared.py). When the owners have updated their parts, everybody copies the result out. No message;
ranks tell each other through the key's counters (host_key.py), so none waits for another but in a round of this key.

Values that are still on their way into the memory (parts.py) are counted as they come: a row once all of it is there,
and of an owner's part of the result each segment. This rank's own part of a row comes behind what the others own of it.

Cost per rank, n elements, p ranks: (p-1)n/p elements copied in, unless the values lie in shared memory; (p-1)n/p added;
n copied out. Scratch: n elements where values are copied in, n/p else. Restrictions: one host. (Why not `hosted` with
rings of one rank: docs/adr/0042.)
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.host_key import FILLED, GATHERED, VALUES, HostKey
from mpikv.collectives.parts import HERE, Coming, Parts
from mpikv.collectives.stages import HOST_SEGMENT_BYTES, Span, cut, drive
from mpikv.engine.operation import Done, Steps, Waiter, Waking
from mpikv.hostmemory.sums import in_order
from mpikv.placement.labels import Comparison


def _rows(bounds: Sequence[int], itemsize: int, rank: int) -> Iterator[list[Span]]:
    """Row after row: a segment of each owner's part that has so many, at last of the part that this rank owns."""
    step = HOST_SEGMENT_BYTES // itemsize
    owned = [*pairwise(bounds[rank + 1 :]), *pairwise(bounds[: rank + 2])]
    for at in range(0, max(end - begin for begin, end in owned), step):
        yield [(begin + at, min(begin + at + step, end)) for begin, end in owned if begin + at < end]


class _Telling:
    """A stage that counts what of this rank's values is there. ends: how many of what comes make up each count."""

    def __init__(self, key: HostKey, word: int, coming: Coming, ends: Sequence[int]) -> None:
        self._key, self._word, self._coming, self._ends = key, word, coming, ends
        self.count = 0
        self.done = not ends

    def move(self) -> bool:
        moved = not self._coming.done and self._coming.move()
        count = bisect.bisect_right(self._ends, self._coming.count)
        if count > self.count:
            self.count = count
            self._key.count(self._word, count)
            self.done = count == len(self._ends)
        return moved

    def wakes(self, waiter: Waiter) -> bool:
        return self._coming.wakes(waiter)

    def beside(self, request: Waking, count: int) -> _Beside:
        """A request that is done when another one is, and so much has been counted. It goes on counting."""
        return _Beside(self, request, count)


class _Beside(Waking):
    def __init__(self, telling: _Telling, request: Waking, count: int) -> None:
        self._telling, self._request, self._count = telling, request, count

    def test(self) -> bool:
        if not self._telling.done:
            self._telling.move()
        return self._telling.count >= self._count and self._request.test()

    def wakes(self, waiter: Waiter) -> bool:
        return (self._telling.done or self._telling.wakes(waiter)) and self._request.wakes(waiter)


def reduce_scatter(
    rank: int,
    values: HostArray,
    bounds: Sequence[int],
    key: HostKey,
    *,
    combine: np.ufunc = np.add,
    comparison: Comparison | None = None,
    parts: Parts = HERE,
) -> Steps[HostArray]:
    """Add `values` over all ranks, or `combine` them; returns (n,) with the result in this rank's own part.

    values: (n,), contiguous, in the dtype of the sums; not to be changed until the `allgather` of the same round has
    ended. bounds: rank i owns `[bounds[i], bounds[i+1])`. parts: how the values, in shared memory unless all are there,
    come, and what becomes of the result. Collective. Yields each request it must wait for.
    """
    size, own = len(bounds) - 1, key.own
    others = [place for place in range(size) if place != rank]
    begin, end = bounds[rank], bounds[rank + 1]
    step = HOST_SEGMENT_BYTES // values.itemsize
    telling, landed = None, parts.landed
    if landed is not None:
        assert key.is_shared(values)
        key.begin(values, own, comparison)
        rows = list(_rows(bounds, values.itemsize, rank))
        coming = parts.coming(span for row in rows for span in row)
        telling = _Telling(key, FILLED, coming, list(accumulate(map(len, rows))))
    elif key.is_shared(values):
        key.begin(values, own, comparison)
        key.count(FILLED, -(-max(b - a for a, b in pairwise(bounds)) // step))
    else:
        key.begin(own, own, comparison)
        for done, row in enumerate(_rows(bounds, values.itemsize, rank), 1):
            for first, last in row:
                if not begin <= first < end:  # not its own
                    own[first:last] = values[first:last]
            key.count(FILLED, done)
            if values.nbytes > HOST_SEGMENT_BYTES:
                yield Done()  # let other keys move on, too
    sources: list[HostArray] = []
    for done, at in enumerate(range(begin, end, step), 1):
        filled: Waking = key.awaited(others, FILLED, done)
        if telling is not None:
            filled = telling.beside(filled, done)
        if not filled.test():
            yield filled
        if not sources:
            sources = [values if place == rank else key.array_of(place, VALUES) for place in range(size)]
        part = slice(at, min(at + step, end))
        in_order(own[part], [theirs[part] for theirs in sources], combine)
        if landed is not None:
            landed(own, (part.start, part.stop))
    if telling is not None:
        yield from drive(telling)
    return own


def allgather(
    rank: int, bounds: Sequence[int], key: HostKey, outs: Sequence[HostArray] = (), *, parts: Parts = HERE
) -> Steps[None]:
    """Complete the value: part i of it is rank i's at the start, on all ranks at the end; copy it to `outs`.

    outs: (n,), contiguous, any dtype; none where parts are on their way. parts: how this rank's part comes, and what
    becomes of the others. Collective. Yields each request it must wait for.
    """
    size = len(bounds) - 1
    telling, landed = None, parts.landed
    # Each owner's part as a whole, unless it comes in segments: then all ranks count these.
    segments = [[part] if part[0] < part[1] else [] for part in pairwise(bounds)]
    if landed is not None:
        segments = [list(cut(part, key.value.itemsize, HOST_SEGMENT_BYTES)) for part in pairwise(bounds)]
        telling = _Telling(key, GATHERED, parts.coming(segments[rank]), range(1, len(segments[rank]) + 1))
    elif segments[rank]:
        key.count(GATHERED, 1)
    for place in (*range(rank, size), *range(rank)):
        for done, (begin, end) in enumerate(segments[place], 1):
            if place != rank:
                complete: Waking = key.awaited([place], GATHERED, done)
                if telling is not None:
                    complete = telling.beside(complete, 0)
                if not complete.test():
                    yield complete
                if landed is not None:
                    landed(key.value, (begin, end))
            for out in outs:
                out[begin:end] = key.value[begin:end]
    if telling is not None:
        yield from drive(telling)
