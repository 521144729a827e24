"""Recursive halving (reduce-scatter) and recursive doubling (allgather).

In each of log2(p) steps a rank sends one half of the elements that it still adds to a partner, and receives the
partner's values of the other half, which it adds; partners are nearer at every step. The allgather runs the same steps
backwards. Where p is no power of two, each rank from the largest power of two on is *folded*: it sends its buffer to a
partner at the start, receives the result at the end, and owns nothing.

Cost per rank: log2(p) steps, n(p-1)/p elements in each half (the folded ranks and their partners: n more); scratch: n/2
elements (n at a partner). Restrictions: folded ranks own no chunk.
Source: Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Steps
from mpikv.placement.algorithms import most_owners
from mpikv.transports.base import Group


def _check(group: Group, chunks: Sequence[int]) -> int:
    core = most_owners("halving_doubling", group.size)
    if chunks[core] != chunks[group.size]:
        raise ValueError(f"halving_doubling: of {group.size} ranks only the first {core} may own a chunk")
    return core


def exchanges(rank: int, chunks: Sequence[int]) -> Iterator[tuple[int, slice, slice]]:
    """How one of a power of two of ranks comes to its own chunk: partners, what is kept, what is given to each."""
    low, high = 0, len(chunks) - 1  # the chunks that this rank still holds
    while high - low > 1:
        middle = (low + high) // 2
        keep, give = ((low, middle), (middle, high)) if rank < middle else ((middle, high), (low, middle))
        yield rank ^ (middle - low), slice(chunks[keep[0]], chunks[keep[1]]), slice(chunks[give[0]], chunks[give[1]])
        low, high = keep


def reduce_scatter(
    group: Group, buf: HostArray, chunks: Sequence[int], tag: int, combine: np.ufunc = np.add
) -> Steps[None]:
    """Raises ValueError when a folded rank owns a chunk."""
    core, me = _check(group, chunks), group.rank
    if buf.size == 0:
        return
    room = group.room(buf.dtype)
    if me >= core:
        yield group.isend(buf, me - core, tag)
        return
    if me + core < group.size:
        folded = group.empty(buf.size + room, buf.dtype)
        yield group.irecv(folded, me + core, tag)
        combine(buf, folded[: buf.size], out=buf)
        del folded
    for partner, keep, give in exchanges(me, chunks[: core + 1]):
        kept, given = buf[keep], buf[give]
        send = group.isend(given, partner, tag) if given.size else None
        if kept.size:
            scratch = group.empty(kept.size + room, buf.dtype)
            yield group.irecv(scratch, partner, tag)
            scratch = scratch[: kept.size]
            # Both sides of an exchange put the lower rank's values first, so that the bits depend on the ranks alone.
            combine(*((kept, scratch) if me < partner else (scratch, kept)), out=kept)
        if send is not None:
            yield send


def allgather(group: Group, buf: HostArray, chunks: Sequence[int], tag: int) -> Steps[None]:
    """Raises ValueError when a folded rank owns a chunk."""
    core, me = _check(group, chunks), group.rank
    if buf.size == 0:
        return
    if me >= core:
        yield group.irecv(buf, me - core, tag)
        return
    width = 1
    while width < core:
        low = me // width * width  # this rank holds the chunks [low, low + width)
        partner = me ^ width
        other = partner // width * width
        mine, theirs = buf[chunks[low] : chunks[low + width]], buf[chunks[other] : chunks[other + width]]
        send = group.isend(mine, partner, tag) if mine.size else None
        if theirs.size:
            yield group.irecv(theirs, partner, tag)
        if send is not None:
            yield send
        width *= 2
    if me + core < group.size:
        yield group.isend(buf, me + core, tag)
