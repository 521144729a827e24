"""The two halves of an allreduce between ranks that are all on one host, through the memory that they share.

Each rank copies its values into the shared memory, row by row: a *row* is one segment of every owner's shard. An owner
adds its shard, row by row, once all ranks have filled the row, in the order of the ranks: the same bits as servers and
as calls that all ranks make in common (shared.py). When the owners have updated their shards, every rank copies the
result out. No message: ranks count what they have done in the key's counters (host_key.py), so a rank waits for another
only in a round of this key.

Cost per rank, n elements, p ranks: (p-1)n/p elements copied in, unless the values lie in shared memory; (p-1)n/p added;
n copied out. Scratch: n elements where values are copied in, n/p else. Restrictions: one host. (Why not `hosted` with
rings of one rank: docs/adr/0042.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.host_key import FILLED, GATHERED, REDUCED, TOTALS, VALUES, HostKey
from mpikv.collectives.stages import HOST_SEGMENT_BYTES
from mpikv.engine.operation import Done, Steps
from mpikv.hostmemory.sums import in_order
from mpikv.placement.labels import Comparison


def reduce_scatter(
    rank: int,
    values: HostArray,
    bounds: Sequence[int],
    key: HostKey,
    *,
    combine: np.ufunc = np.add,
    comparison: Comparison | None = None,
    to_first: bool = False,
) -> Steps[HostArray]:
    """Add `values` over all ranks, or `combine` them; returns (n,) with the result in this rank's own shard.

    to_first: the first rank gets the results of all shards, and nobody has one of its own.

    values: (n,), contiguous, in the dtype of the sums; not to be changed until the `allgather` of the same round has
    ended. bounds: rank i owns `[bounds[i], bounds[i+1])`. Collective. Yields each request it must wait for.
    """
    size, own = len(bounds) - 1, key.own
    shards = list(pairwise(bounds))
    others = [other for other in range(size) if other != rank]
    step = HOST_SEGMENT_BYTES // values.itemsize
    n_rows = -(-max(end - begin for begin, end in shards) // step)
    if key.is_shared(values):
        key.begin(values, own, comparison)
        key.count(FILLED, n_rows)
    else:
        key.begin(own, own, comparison)
        for row in range(n_rows):
            for other in others:
                begin, end = shards[other]
                segment = slice(begin + row * step, min(begin + (row + 1) * step, end))
                own[segment] = values[segment]
            key.count(FILLED, row + 1)
            if values.nbytes > HOST_SEGMENT_BYTES:
                yield Done()  # so that the engine can move other keys on
    begin, end = shards[rank]
    sources: list[HostArray] = []
    for row, at in enumerate(range(begin, end, step)):
        filled = key.awaited(others, FILLED, row + 1)
        if not filled.test():
            yield filled
        if not sources:
            sources = [values if source == rank else key.array_of(source, VALUES) for source in range(size)]
            total = key.array_of(0, TOTALS) if to_first and rank else own
        segment = slice(at, min(at + step, end))
        in_order(total[segment], [source[segment] for source in sources], combine)
    if to_first:
        key.count(REDUCED, 1)
        if not rank:
            yield key.awaited(others, REDUCED, 1)
    return own


def allgather(rank: int, bounds: Sequence[int], key: HostKey, outs: Sequence[HostArray] = ()) -> Steps[None]:
    """Complete the value, of which shard i is rank i's at the start, and copy it to `outs`, of any dtype."""
    if bounds[rank] < bounds[rank + 1]:
        key.count(GATHERED, 1)
    for owner in (*range(rank, len(bounds) - 1), *range(rank)):
        shard = slice(bounds[owner], bounds[owner + 1])
        if shard.start == shard.stop:
            continue
        if owner != rank:
            complete = key.awaited([owner], GATHERED, 1)
            if not complete.test():
                yield complete
        for out in outs:
            out[shard] = key.value[shard]
