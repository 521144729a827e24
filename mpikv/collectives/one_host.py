"""The two halves of an allreduce between ranks that are all on one host, through the memory that they share.

Each rank copies its values into the shared memory, row by row: a *row* is one segment of every owner's shard. An owner
adds its shard, row by row, once all ranks have filled the row, in the order of the ranks: the same bits as `naive` and
as calls that all ranks make in common (shared.py). When the owners have updated their shards, every rank copies the
result out. No message: ranks count what they have done in the key's counters (host_key.py), so a rank waits for another
only in a round of this key.

Where a pipeline loads the values into the memory (pipeline.py), a rank counts each row that is loaded, and in the
allgather each segment of its shard. It loads its own shard's segment of a row last, since the others need the rest.

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
from mpikv.collectives.host_key import FILLED, GATHERED, REDUCED, TOTALS, VALUES, HostKey
from mpikv.collectives.pipeline import NO_PIPELINE, Loader, Pipeline
from mpikv.collectives.stages import HOST_SEGMENT_BYTES, Span, cut, drive
from mpikv.engine.operation import Done, Steps, Waiter, Waking
from mpikv.hostmemory.sums import in_order
from mpikv.placement.labels import Comparison


def _rows(bounds: Sequence[int], itemsize: int, rank: int) -> Iterator[list[Span]]:
    """Yield the rows: a segment of each owner's shard that is long enough, the segment of this rank's shard last."""
    step = HOST_SEGMENT_BYTES // itemsize
    owned = [*pairwise(bounds[rank + 1 :]), *pairwise(bounds[: rank + 2])]
    for at in range(0, max(end - begin for begin, end in owned), step):
        yield [(begin + at, min(begin + at + step, end)) for begin, end in owned if begin + at < end]


class _LoadAndCount:
    """A stage that loads this rank's values and counts them. ends: for each count, how many segments must be loaded."""

    def __init__(self, key: HostKey, word: int, loader: Loader, ends: Sequence[int]) -> None:
        self._key, self._word, self._loader, self._ends = key, word, loader, ends
        self.count = 0
        self.done = not ends

    def move(self) -> bool:
        moved = not self._loader.done and self._loader.move()
        count = bisect.bisect_right(self._ends, self._loader.count)
        if count > self.count:
            self.count = count
            self._key.count(self._word, count)
            self.done = count == len(self._ends)
        return moved

    def wakes(self, waiter: Waiter) -> bool:
        return self._loader.wakes(waiter)

    def and_counted(self, request: Waking, count: int) -> _AndCounted:
        """Return a request that is done when another one is and this stage has counted so far. It moves this stage."""
        return _AndCounted(self, request, count)


class _AndCounted(Waking):
    def __init__(self, loading: _LoadAndCount, request: Waking, count: int) -> None:
        self._loading, self._request, self._count = loading, request, count

    def test(self) -> bool:
        if not self._loading.done:
            self._loading.move()
        return self._loading.count >= self._count and self._request.test()

    def wakes(self, waiter: Waiter) -> bool:
        return (self._loading.done or self._loading.wakes(waiter)) and self._request.wakes(waiter)


def reduce_scatter(
    rank: int,
    values: HostArray,
    bounds: Sequence[int],
    key: HostKey,
    *,
    combine: np.ufunc = np.add,
    comparison: Comparison | None = None,
    pipeline: Pipeline = NO_PIPELINE,
    to_first: bool = False,
) -> Steps[HostArray]:
    """Add `values` over all ranks, or `combine` them; returns (n,) with the result in this rank's own shard.

    to_first: the first rank gets the results of all shards, and nobody has one of its own.

    values: (n,), contiguous, in the dtype of the sums; not to be changed until the `allgather` of the same round has
    ended. bounds: rank i owns `[bounds[i], bounds[i+1])`. pipeline: loads the values, which are in shared memory then,
    and takes the result. Collective. Yields each request it must wait for.
    """
    size, own = len(bounds) - 1, key.own
    others = [other for other in range(size) if other != rank]
    begin, end = bounds[rank], bounds[rank + 1]
    step = HOST_SEGMENT_BYTES // values.itemsize
    loading, on_complete = None, pipeline.on_complete
    if on_complete is not None:
        assert key.is_shared(values)
        key.begin(values, own, comparison)
        rows = list(_rows(bounds, values.itemsize, rank))
        loader = pipeline.load(span for row in rows for span in row)
        loading = _LoadAndCount(key, FILLED, loader, list(accumulate(map(len, rows))))
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
                yield Done()  # so that the engine can move other keys on
    sources: list[HostArray] = []
    for done, at in enumerate(range(begin, end, step), 1):
        filled: Waking = key.awaited(others, FILLED, done)
        if loading is not None:
            filled = loading.and_counted(filled, done)
        if not filled.test():
            yield filled
        if not sources:
            sources = [values if source == rank else key.array_of(source, VALUES) for source in range(size)]
            total = key.array_of(0, TOTALS) if to_first and rank else own
        segment = slice(at, min(at + step, end))
        in_order(total[segment], [source[segment] for source in sources], combine)
        if on_complete is not None:
            on_complete(own, (segment.start, segment.stop))
    if loading is not None:
        yield from drive(loading)
    if to_first:
        key.count(REDUCED, 1)
        if not rank:
            yield key.awaited(others, REDUCED, 1)
    return own


def allgather(
    rank: int, bounds: Sequence[int], key: HostKey, outs: Sequence[HostArray] = (), *, pipeline: Pipeline = NO_PIPELINE
) -> Steps[None]:
    """Complete the value: shard i of it is rank i's at the start, on all ranks at the end; copy it to `outs`.

    outs: (n,), contiguous, any dtype; none where there is a pipeline. pipeline: loads this rank's shard, and takes the
    others. Collective. Yields each request it must wait for.
    """
    size = len(bounds) - 1
    loading, on_complete = None, pipeline.on_complete
    # Each owner counts its shard as a whole; where there are pipelines, which all ranks have then, segment by segment.
    segments = [[shard] if shard[0] < shard[1] else [] for shard in pairwise(bounds)]
    if on_complete is not None:
        segments = [list(cut(shard, key.value.itemsize, HOST_SEGMENT_BYTES)) for shard in pairwise(bounds)]
        loading = _LoadAndCount(key, GATHERED, pipeline.load(segments[rank]), range(1, len(segments[rank]) + 1))
    elif segments[rank]:
        key.count(GATHERED, 1)
    for owner in (*range(rank, size), *range(rank)):
        for done, (begin, end) in enumerate(segments[owner], 1):
            if owner != rank:
                complete: Waking = key.awaited([owner], GATHERED, done)
                if loading is not None:
                    complete = loading.and_counted(complete, 0)
                if not complete.test():
                    yield complete
                if on_complete is not None:
                    on_complete(key.value, (begin, end))
            for out in outs:
                out[begin:end] = key.value[begin:end]
    if loading is not None:
        yield from drive(loading)
