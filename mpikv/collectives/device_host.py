"""The two halves of an allreduce between ranks of one host whose values are in device memory, through that memory.

Each rank names its values to the others (spaces/peers). An owner adds its part straight from where all ranks have
theirs, in the order of the ranks, as `one_host` and `naive` do. When the owners have updated
their parts, everybody copies them from the owners' memory. Ranks tell each other how far they have come through the
key's counters in host memory (host_key.py), each after its own GPU has done what it counts. So no stream ever waits for
one of another process, nothing blocks the host, and no byte of a value leaves device memory. Several ranks may use one
GPU.

Why no memory changes while others read it. A rank's values are read by the owners, who count GATHERED when their sums
are done; a rank ends no round before all owners have counted that, and then its values may be written over or used for
something else. An owner's part of the result is read by all others. They may end the round while their copies are still
under way, but count FILLED in the next round only when these are done; and only when all have counted that does the
owner write its part again. The first value, at rank 0, is read before any rank counts FILLED for the first time. What
may still be read of a rank after its last round is the result alone, which stays until all ranks say that they read no
more (`Peers.close`). The names of arrays are said anew in a round that begins after all owners have read the last ones;
for the flags host_key.py's argument holds as it is.

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
    """Add `values` over all ranks, or `combine` them. Returns (n,) in the dtype of the sums, with this rank's own part.

    values: (n,), in the dtype of the key, in memory that the others can read; the sum is written there, where it has
    that dtype. Not to be changed until the `allgather` of the same round has ended. bounds: rank i owns
    `[bounds[i], bounds[i+1])`. The sum is in the space's stream when this ends, but may not be done. Collective. Yields
    each request it must wait for.
    """
    size = len(bounds) - 1
    own = slice(bounds[rank], bounds[rank + 1])
    # What this rank has read of the others in the last round is read when this is done, and its values are there.
    yield space.stream_event()
    key.begin(values, key.value, comparison)
    key.count(FILLED, 1)
    if own.start == own.stop:
        return values
    yield key.awaited([place for place in range(size) if place != rank], FILLED, 1)
    wide = sum_dtype(values.dtype)
    totals = values if values.dtype == wide else space.empty(values.size, wide)
    # The others read their own parts of `values` alone; but this rank's part is itself a term, in its turn.
    total = totals[own] if rank < 2 else space.empty(own.stop - own.start, wide)
    terms = []
    for place in range(size):
        term = (values if place == rank else key.array_of(place, VALUES, values.dtype))[own]
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
    """Complete the result: part i of it is rank i's at the start, on all ranks at the end; copy it to `outs`.

    outs: (n,), any dtype; they are written when this ends. What completes the result may only be in the space's stream
    then. Collective. Yields each request it must wait for.
    """
    size = len(bounds) - 1
    if bounds[rank] < bounds[rank + 1]:
        yield space.stream_event()
        key.count(GATHERED, 1)
    for place in (*range(rank + 1, size), *range(rank)):
        part = slice(bounds[place], bounds[place + 1])
        if part.start < part.stop:
            yield key.awaited([place], GATHERED, 1)
            space.copy(key.value[part], key.array_of(place, TOTALS, key.value.dtype)[part])
    for out in outs:
        space.copy(out, key.value)  # from here: the bytes have come over a link between GPUs already
    if outs:
        yield space.stream_event()
