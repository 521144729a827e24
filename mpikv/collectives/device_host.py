"""The two halves of an allreduce between ranks of one host whose values are in device memory, through that memory.

Each rank publishes where its values are (spaces/peers). An owner reads its shard of all ranks' values in their memory
and adds it, in the order of the ranks, as `one_host` and `naive` do. When the owners have updated their shards, all
other ranks copy them from the owners' memory. Ranks count what they have done in the key's counters in host memory
(host_key.py), each after its own GPU has done it. So no stream ever waits for one of another process, nothing blocks
the host, and no byte of a value leaves device memory. Several ranks may use one GPU.

Why no memory changes while others read it. A rank's values are read by the owners, who count GATHERED when their sums
are done; a rank ends no round before all owners have counted that, and then its values may be overwritten. An owner's
shard of the result is read by all others. They may end the round while their copies are still under way, but count
FILLED in the next round only when these are done; and the owner writes its shard again only when all have counted that.
The first value, at rank 0, is read before any rank counts FILLED for the first time. After a rank's last round others
may still read its result, which stays until all ranks have counted that they read no more (`Peers.close`). Where arrays
are is published anew in a round that begins after all owners have read the last arrays; for the counters the argument
in host_key.py holds as it is.

Cost per rank, n elements, p ranks: p-1 kernels, each of which reads n/p elements of another rank, and p-1 copies of n/p
elements; one copy of n for each array in `outs`. Scratch: n elements, where sums have a wider dtype. No message, no
copy between device and host. Restrictions: one host, GPUs that can read each other's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.collectives.host_key import FILLED, GATHERED, TOTALS, VALUES, HostKey
from mpikv.engine.operation import Steps
from mpikv.placement.labels import Comparison
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace


def reduce_scatter(
    rank: int,
    values: SpaceArray,
    bounds: Sequence[int],
    key: HostKey,
    space: DeviceSpace,
    *,
    combine: np.ufunc = np.add,
    comparison: Comparison | None = None,
) -> Steps[SpaceArray]:
    """Add `values` over all ranks, or `combine` them. Returns (n,) in the dtype of the sums, with this rank's shard.

    values: (n,), in the dtype of the key, in memory that the others can read; the sum is written there, where it has
    that dtype. Not to be changed until the `allgather` of the same round has ended. bounds: rank i owns
    `[bounds[i], bounds[i+1])`. The sum is in the space's stream when this ends, but may not be done. Collective. Yields
    each request it must wait for.
    """
    size = len(bounds) - 1
    own = slice(bounds[rank], bounds[rank + 1])
    # When this is done, this rank has read all that it reads of the last round, and its values are in memory.
    yield space.stream_event()
    key.begin(values, key.value, comparison)
    key.count(FILLED, 1)
    if own.start == own.stop:
        return values
    yield key.awaited([other for other in range(size) if other != rank], FILLED, 1)
    wide = sum_dtype(values.dtype)
    totals = values if values.dtype == wide else space.empty(values.size, wide)
    # The others read only their own shards of `values`, so the sum of this rank's shard may be written there. But from
    # rank 2 on this rank's own values are added after others have been, so until then the sum needs other memory.
    total = totals[own] if rank < 2 else space.empty(own.stop - own.start, wide)
    terms = []
    for source in range(size):
        term = (values if source == rank else key.array_of(source, VALUES, values.dtype))[own]
        terms.append(term.astype(wide, copy=False))
    if size > 1:
        first, second, *rest = terms
        combine(first, second, out=total)
        for term in rest:
            combine(total, term, out=total)
    else:
        np.copyto(total, terms[0])
    if rank >= 2:
        np.copyto(totals[own], total)
    return totals


def allgather(
    rank: int, bounds: Sequence[int], key: HostKey, space: DeviceSpace, outs: Sequence[SpaceArray] = ()
) -> Steps[None]:
    """Complete the result: shard i of it is rank i's at the start, on all ranks at the end; copy it to `outs`.

    outs: (n,), any dtype; they are written when this ends. Copies into the result may still be under way in the space's
    stream then. Collective. Yields each request it must wait for.
    """
    size = len(bounds) - 1
    if bounds[rank] < bounds[rank + 1]:
        yield space.stream_event()
        key.count(GATHERED, 1)
    for other in (*range(rank + 1, size), *range(rank)):
        shard = slice(bounds[other], bounds[other + 1])
        if shard.start < shard.stop:
            yield key.awaited([other], GATHERED, 1)
            space.copy(key.value[shard], key.array_of(other, TOTALS, key.value.dtype)[shard])
    for out in outs:
        space.copy(out, key.value)  # from this rank's copy, so that no byte crosses a link between GPUs twice
    if outs:
        yield space.stream_event()
