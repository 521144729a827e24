"""The direct algorithm, the reference for all others.

Reduce-scatter: every rank sends each chunk straight to its owner, who adds the contributions in rank order, so that the
sum is `((x0 + x1) + x2) + ...` for every element. Allgather: every owner sends its chunk to every other rank.

Cost per rank: p-1 messages of n/p elements in each half, all at once; scratch: p-1 chunks at the owner. Restrictions:
none. As few steps as possible, but each rank receives p-1 messages at the same time, which is slow for large p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation, Steps
from mpikv.transports.base import Group


def reduce_scatter(
    group: Group, buf: HostArray, chunks: Sequence[int], tag: int, combine: np.ufunc = np.add
) -> Steps[None]:
    me = group.rank
    own = buf[chunks[me] : chunks[me + 1]]
    incoming: dict[int, HostArray] = {}
    receives: dict[int, Operation] = {}
    if own.size:
        for source in range(group.size):
            if source != me:
                incoming[source] = group.empty(own.size + group.room(buf.dtype), buf.dtype)
                receives[source] = group.irecv(incoming[source], source, tag)
    sends = []
    for owner in _others_from(me, group.size):
        if chunks[owner] < chunks[owner + 1]:
            sends.append(group.isend(buf[chunks[owner] : chunks[owner + 1]], owner, tag))
    if own.size:
        total = own
        for source in range(group.size):
            if source != me:
                yield receives[source]
            values = own if source == me else incoming.pop(source)[: own.size]
            if source == 0:
                total = values
            else:
                combine(total, values, out=total)
        if total is not own:
            own[...] = total
    yield from sends


def allgather(group: Group, buf: HostArray, chunks: Sequence[int], tag: int) -> Steps[None]:
    me = group.rank
    own = buf[chunks[me] : chunks[me + 1]]
    requests = [
        group.irecv(buf[chunks[owner] : chunks[owner + 1]], owner, tag)
        for owner in _others_from(me, group.size)
        if chunks[owner] < chunks[owner + 1]
    ]
    if own.size:
        for dest in _others_from(me, group.size):
            requests.append(group.isend(own, dest, tag))
    yield from requests


def _others_from(me: int, size: int) -> list[int]:
    """Return all other ranks, starting after this one, so that not all ranks send to rank 0 first."""
    return [(me + step) % size for step in range(1, size)]
