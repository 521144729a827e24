"""Ring reduce-scatter and allgather: together, ring allreduce.

The buffer is cut into one chunk per rank. In each of p-1 steps every rank sends one chunk to the next rank and adds the
one that comes from the rank before it to its own; then each rank holds one finished chunk, which travels round once
more. Chunks travel in segments, so that one is in flight while the last is added. Works for any p and any n, n < p
included (empty chunks are skipped). Chunk c is added in the order c+1, c+2, ..., c of the ranks.

Cost per rank: p-1 steps of n/p elements in each half, bandwidth-optimal for any p; scratch: 2 segments.
Restrictions: none.
Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpikv.arrays import HostArray
from mpikv.keys import even_bounds
from mpikv.transports.base import Group, Request, Steps

SEGMENT_BYTES = 1 << 18  # two segments of scratch and the part they are added to stay in a core's second-level cache


def bounds(n_elems: int, size: int) -> tuple[int, ...]:
    """Chunk i, owned by rank i, is `[bounds[i], bounds[i+1])`."""
    return even_bounds(n_elems, size)


def owners(size: int) -> int:
    """How many ranks, from 0 on, may own a chunk."""
    return size


def _segments(begin: int, end: int, itemsize_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, SEGMENT_BYTES // itemsize_bytes)
    for first in range(begin, end, step):
        yield first, min(first + step, end)


def reduce_scatter(group: Group, buf: HostArray, chunks: Sequence[int], tag: int) -> Steps[None]:
    """Add `buf` over all ranks; afterwards each rank's own chunk of its `buf` holds the sum.

    buf: (n,), contiguous, same n and dtype on every rank; its other chunks hold partial sums afterwards. Collective.
    Yields each request it must wait for.
    """
    p, me = group.size, group.rank
    after, before = (me + 1) % p, (me - 1) % p
    longest = max(chunks[i + 1] - chunks[i] for i in range(p))
    scratch = np.empty((2, max(1, min(longest, SEGMENT_BYTES // buf.itemsize))), buf.dtype)
    for step in range(p - 1):
        send, receive = (me - step - 1) % p, (me - step - 2) % p
        sends = [group.isend(buf[a:b], after, tag) for a, b in _segments(chunks[send], chunks[send + 1], buf.itemsize)]
        expected = list(_segments(chunks[receive], chunks[receive + 1], buf.itemsize))
        receives: list[Request] = []
        for i, (a, b) in enumerate(expected):
            if i == 0:
                receives.append(group.irecv(scratch[0, : b - a], before, tag))
            if i + 1 < len(expected):
                c, d = expected[i + 1]
                receives.append(group.irecv(scratch[(i + 1) % 2, : d - c], before, tag))
            yield receives[i]
            np.add(scratch[i % 2, : b - a], buf[a:b], out=buf[a:b])
        yield from sends


def allgather(group: Group, buf: HostArray, chunks: Sequence[int], tag: int) -> Steps[None]:
    """Give every rank every chunk: chunk i of `buf` is rank i's at the start, on all ranks at the end.

    buf: (n,), contiguous, same n and dtype on every rank. Collective. Yields each request it must wait for.
    """
    p, me = group.size, group.rank
    after, before = (me + 1) % p, (me - 1) % p
    for step in range(p - 1):
        send, receive = (me - step) % p, (me - step - 1) % p
        requests: list[Request] = [
            group.irecv(buf[a:b], before, tag) for a, b in _segments(chunks[receive], chunks[receive + 1], buf.itemsize)
        ]
        requests += [
            group.isend(buf[a:b], after, tag) for a, b in _segments(chunks[send], chunks[send + 1], buf.itemsize)
        ]
        yield from requests
