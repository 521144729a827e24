"""The collectives of a group by messages, as generators: what runs where the ranks share no memory.

`allreduce` and `reduce_scatter` run the algorithms of `mpikv.collectives`, chosen by the same table as a store's;
everything that only moves data is one `exchange`, in which each rank sends what the others are to have. All arrays are
flat and contiguous. A generator uses one tag; ranks that run different calls under one tag would mix their messages up,
so a call's tag is its own (group.py).

Cost per rank: `exchange` one message to and from each rank that has something to tell; the others as their algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.collectives import naive, ring
from mpikv.collectives.select import ALGORITHMS
from mpikv.engine.request import Steps
from mpikv.errors import ShapeMismatch
from mpikv.groups.mailbox import Mailbox
from mpikv.groups.operators import Operator
from mpikv.placement.algorithms import bounds_of, choose
from mpikv.transports.base import Group

DIRECT_RANKS, DIRECT_BYTES = 4, 64 << 10  # up to either a reduce-scatter sends each part straight to its owner
TOKEN = np.zeros(1, np.uint8)


def allreduce(group: Group, buf: HostArray, operator: Operator, tag: int, algorithm: str = "auto") -> Steps[None]:
    """Combine `buf` over all ranks, in place. algorithm: as MPIKV_ALGORITHM has it."""
    if group.size == 1 or buf.size == 0:
        return
    name = choose(buf.nbytes, group.size, "auto" if algorithm == "native" else algorithm, group.hosts)
    module = ALGORITHMS[name]
    chunks = bounds_of(name, buf.size, group.hosts)
    own = slice(chunks[group.rank], chunks[group.rank + 1])
    wide = buf.astype(sum_dtype(buf.dtype), copy=False)
    yield from module.reduce_scatter(group, wide, chunks, tag, combine=operator.combine)
    operator.finish(wide[own], group.size)
    if wide is not buf:
        np.copyto(buf[own], wide[own], casting="unsafe")
    yield from module.allgather(group, buf, chunks, tag)


def reduce(group: Group, buf: HostArray, out: HostArray, operator: Operator, *, root: int, tag: int) -> Steps[None]:
    """Combine `buf` over all ranks into the root's `out` (which may be `buf`), along a binomial tree."""
    size, me = group.size, (group.rank - root) % group.size
    wide = buf.astype(sum_dtype(buf.dtype), copy=out is not buf or me != 0)
    scratch = np.empty_like(wide)
    bit = 1
    while bit < size and buf.size:
        if me & bit:
            yield group.isend(wide, (me - bit + root) % size, tag)
            return
        if me + bit < size:
            yield group.irecv(scratch, (me + bit + root) % size, tag)
            operator.combine(wide, scratch, out=wide)
        bit *= 2
    if me == 0:
        operator.finish(wide, size)
        np.copyto(out, wide, casting="unsafe")


def reduce_scatter(
    group: Group, parts: Sequence[HostArray], out: HostArray, operator: Operator, tag: int
) -> Steps[None]:
    """Combine part number `group.rank` of every rank into `out`. parts: one for each rank, left as they are."""
    chunks = (0, *(int(end) for end in np.cumsum([part.size for part in parts])))
    buf = np.concatenate(parts).astype(sum_dtype(out.dtype), copy=False)
    direct = group.size <= DIRECT_RANKS or buf.nbytes <= DIRECT_BYTES
    yield from (naive if direct else ring).reduce_scatter(group, buf, chunks, tag, combine=operator.combine)
    own = buf[chunks[group.rank] : chunks[group.rank + 1]]
    operator.finish(own, group.size)
    np.copyto(out, own, casting="unsafe")


def exchange(mailbox: Mailbox, outgoing: Mapping[int, HostArray], incoming: Mapping[int, HostArray]) -> Steps[None]:
    """Send `outgoing[rank]` to each rank in it, receive `incoming[rank]` from each rank in it. Both may have `me`.

    mailbox: of the call's tag. Empty arrays are sent, too: lengths that do not fit are found where the message comes,
    and it always comes. Raises ShapeMismatch.
    """
    group, me = mailbox.group, mailbox.group.rank
    others = [(me + step) % group.size for step in range(1, group.size)]  # not all ranks send to rank 0 first
    sends = [group.isend(outgoing[rank], rank, mailbox.tag) for rank in others if rank in outgoing]
    if me in incoming and me in outgoing:
        if incoming[me].size != outgoing[me].size:
            raise ShapeMismatch(f"this rank sends itself {outgoing[me].size} elements, and expects {incoming[me].size}")
        incoming[me][...] = outgoing[me]
    yield from mailbox.receive_all({rank: incoming[rank] for rank in others if rank in incoming})
    yield from sends


def barrier(group: Group, tag: int) -> Steps[None]:
    """Wait until every rank has come: in step k each rank hears from the one 2^k before it."""
    distance = 1
    while distance < group.size:
        send = group.isend(TOKEN, (group.rank + distance) % group.size, tag)
        yield group.irecv(np.empty(1, np.uint8), (group.rank - distance) % group.size, tag)
        yield send
        distance *= 2
