"""The two halves of an allreduce between ranks of one host whose values are in device memory, through that memory.

Each rank names its values to the others (spaces/peers). An owner adds its part straight from where all ranks have
theirs, in one pass and in the order of the ranks: the same bits as `one_host` and `naive`. When the owners have updated
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

Cost per rank, n elements, p ranks: one kernel, which reads n/p elements of each rank in the key's dtype and writes n/p
in that of the sums; p-1 copies of n/p elements, and one of n elements for each array in `outs`. Scratch: n/p elements.
No message, no copy between device and host. Restrictions: one host, GPUs that can read each other's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpikv.arrays import sum_dtype
from mpikv.collectives.host_key import FILLED, GATHERED, TOTALS, VALUES, HostKey
from mpikv.collectives.labelled import Comparison
from mpikv.engine.request import Steps
from mpikv.spaces.arithmetic import sum_in_order
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.device_array import DeviceArray


def reduce_scatter(
    rank: int,
    values: DeviceArray,
    bounds: Sequence[int],
    key: HostKey,
    space: DeviceSpace,
    *,
    combine: np.ufunc = np.add,
    comparison: Comparison | None = None,
) -> Steps[DeviceArray]:
    """Add `values` over all ranks, or `combine` them. Returns an array of which this rank's own part alone is there, in
    the dtype of the sums.

    values: (n,), in the dtype of the key; not to be changed until the `allgather` of the same round has ended. bounds:
    rank i owns `[bounds[i], bounds[i+1])`. The sum is in the space's stream when this ends, but may not be done.
    Collective. Yields each request it must wait for.
    """
    size = len(bounds) - 1
    begin, end = bounds[rank], bounds[rank + 1]
    yield space.arrived(values)
    # The store itself may have made these values, of several arrays or of another dtype. And what this rank has read of
    # the others in the last round is read when this is done.
    yield space.begun()
    key.begin(values, key.value, comparison)
    key.count(FILLED, 1)
    if begin == end:
        return values
    yield key.awaited([place for place in range(size) if place != rank], FILLED, 1)
    sources, ratios = [], {}
    for place in range(size):
        sources.append((values if place == rank else key.array_of(place, VALUES, values.dtype))[begin:end])
        if place != rank and comparison is not None:
            ratios[place] = comparison.ratio(key.said_by(place))
    own, scaled = space.empty(end - begin, sum_dtype(values.dtype)), [place for place in ratios if ratios[place] != 1.0]
    if scaled:
        sources = [space.cast(source, own.dtype) for source in sources]
    program = sum_in_order(size, sources[0].dtype, own.dtype, scaled=tuple(scaled), how=combine)
    space.launch(program, [*sources, own], [ratios[place] for place in scaled])
    # Elements are counted as in the whole value, of which the memory has this part alone.
    return DeviceArray(space, own.memory, own.offset_bytes - begin * own.itemsize, values.shape, own.dtype)


def allgather(
    rank: int, bounds: Sequence[int], key: HostKey, space: DeviceSpace, outs: Sequence[DeviceArray] = ()
) -> Steps[None]:
    """Complete the result: part i of it is rank i's at the start, on all ranks at the end; copy it to `outs`.

    outs: (n,), any dtype; they are written when this ends. What completes the result may only be in the space's stream
    then. Collective. Yields each request it must wait for.
    """
    size = len(bounds) - 1
    if bounds[rank] < bounds[rank + 1]:
        yield space.begun()
        key.count(GATHERED, 1)
    for place in (*range(rank + 1, size), *range(rank)):
        part = slice(bounds[place], bounds[place + 1])
        if part.start < part.stop:
            yield key.awaited([place], GATHERED, 1)
            space.copy(key.value[part], key.array_of(place, TOTALS, key.value.dtype)[part])
    for out in outs:
        space.copy(out, key.value)  # from here: the bytes have come over a link between GPUs already
    if outs:
        yield space.begun()
