"""The two halves of an allreduce between ranks that are all on one host, through the memory that they share.

Each rank makes its values readable, row by row: a row is a segment of every owner's part. An owner adds its part, row
by row, once all ranks have filled the row, in the order of the ranks: the same bits as `naive` and as calls that all
ranks make together (shared.py). When the owners have updated their parts, everybody copies the result out. No message;
ranks tell each other through the key's counters (host_key.py), so none waits for another but in a round of this key.

Cost per rank, n elements, p ranks: (p-1)n/p elements copied in, unless the values lie in shared memory; (p-1)n/p added;
n copied out. Scratch: n elements where values are copied in, n/p else. Restrictions: one host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from mpikv.arrays import HostArray
from mpikv.collectives.host_key import FILLED, GATHERED, VALUES, HostKey
from mpikv.collectives.labelled import Comparison
from mpikv.collectives.stages import HOST_SEGMENT_BYTES
from mpikv.engine.request import Done, Steps
from mpikv.hostmemory.sums import in_order, scaled


def _rows(bounds: Sequence[int], itemsize: int) -> Iterator[list[slice]]:
    """Row after row: a segment of each owner's part that has so many."""
    step = HOST_SEGMENT_BYTES // itemsize
    longest = max(end - begin for begin, end in pairwise(bounds))
    for at in range(0, longest, step):
        yield [slice(begin + at, min(begin + at + step, end)) for begin, end in pairwise(bounds) if begin + at < end]


def share(key: HostKey, rank: int) -> Steps[None]:
    """Wait until rank 0 has written the key's first value. Collective; before the first round."""
    if key.value.size and rank:
        yield key.awaited([0], GATHERED, 1)
    elif key.value.size:
        key.count(GATHERED, 1)


def reduce_scatter(
    rank: int,
    values: HostArray,
    bounds: Sequence[int],
    key: HostKey,
    *,
    combine: np.ufunc = np.add,
    comparison: Comparison | None = None,
) -> Steps[HostArray]:
    """Add `values` over all ranks, or `combine` them; returns (n,) with the result in this rank's own part.

    values: (n,), contiguous, in the dtype of the sums; not to be changed until the `allgather` of the same round has
    ended. bounds: rank i owns `[bounds[i], bounds[i+1])`. Collective. Yields each request it must wait for.
    """
    size, own = len(bounds) - 1, key.own
    others = [place for place in range(size) if place != rank]
    begin, end = bounds[rank], bounds[rank + 1]
    step = HOST_SEGMENT_BYTES // values.itemsize
    if key.is_shared(values):
        key.begin(values, own, comparison)
        key.count(FILLED, -(-max(b - a for a, b in pairwise(bounds)) // step))
    else:
        key.begin(own, own, comparison)
        for done, row in enumerate(_rows(bounds, values.itemsize), 1):
            for part in row:
                if part.start != begin + (done - 1) * step or begin == end:  # not its own
                    own[part] = values[part]
            key.count(FILLED, done)
            if values.nbytes > HOST_SEGMENT_BYTES:
                yield Done()  # let other keys move on, too
    sources: list[tuple[HostArray, float]] = []
    for done, at in enumerate(range(begin, end, step), 1):
        filled = key.awaited(others, FILLED, done)
        if not filled.test():
            yield filled
        if not sources:
            for place in range(size):
                theirs = values if place == rank else key.array_of(place, VALUES)
                ratio = 1.0
                if place != rank and comparison is not None:
                    ratio = comparison.ratio(key.said_by(place))
                sources.append((theirs, ratio))
        part = slice(at, min(at + step, end))
        in_order(own[part], [scaled(theirs[part], ratio) for theirs, ratio in sources], combine)
    return own


def allgather(rank: int, bounds: Sequence[int], key: HostKey, outs: Sequence[HostArray] = ()) -> Steps[None]:
    """Complete the value: part i of it is rank i's at the start, on all ranks at the end; copy it to `outs`.

    outs: (n,), contiguous, any dtype. Collective. Yields each request it must wait for.
    """
    size = len(bounds) - 1
    if bounds[rank] < bounds[rank + 1]:
        key.count(GATHERED, 1)
    for place in (*range(rank, size), *range(rank)):
        part = slice(bounds[place], bounds[place + 1])
        if part.start == part.stop:
            continue
        if place != rank:
            complete = key.awaited([place], GATHERED, 1)
            if not complete.test():
                yield complete
        for out in outs:
            out[part] = key.value[part]
