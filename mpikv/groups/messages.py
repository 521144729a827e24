"""The collectives of a group by messages, as generators: they run where the ranks share no memory.

`allreduce` and `reduce_scatter` send short arrays straight to who adds them, and long ones around a ring. Calls that
only move data are one `exchange`: one message to and from each rank in its arguments. All arrays are flat and
contiguous. A generator uses one tag. Ranks that run different calls under one tag would receive each other's messages,
so each call has a tag of its own (group.py), or ranks compare their calls first (workers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.arrays.reductions import Reduction
from mpikv.collectives import ring
from mpikv.collectives.broadcast import broadcast
from mpikv.engine.operation import Steps
from mpikv.errors import ShapeMismatch
from mpikv.groups.receive_queue import ReceiveQueue
from mpikv.hostmemory.sums import in_order
from mpikv.placement.keys import even_bounds
from mpikv.transports.base import Group

# Up to here each rank sends every chunk straight to its owner. All these messages are under way at once, where a ring
# has p-1 steps one after another, and the time of short messages is that of the steps. A chunk is at most 32 KiB, which
# MPI sends without asking the receiver first. Of longer arrays the ring keeps both directions of a link busy, and needs
# scratch memory for some segments only.
DIRECT_BYTES = 64 << 10
TOKEN = np.zeros(1, np.uint8)


def _parts(buf: HostArray, bounds: Sequence[int]) -> list[HostArray]:
    return [buf[begin:end] for begin, end in pairwise(bounds)]


class MessageCalls:
    """One rank's side."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._receive_queues: dict[int, ReceiveQueue] = {}

    def receive_queue(self, tag: int) -> ReceiveQueue:
        """Return the queue of this rank's receives under a tag, for `exchange` and `RankGroup.receive`."""
        return self._receive_queues.setdefault(tag, ReceiveQueue(self.group, tag))

    def allreduce(self, arrays: Sequence[HostArray], operator: Reduction, tag: int) -> Steps[None]:
        group = self.group
        for buf in arrays if group.size > 1 else ():
            if not buf.size:
                continue
            chunks = even_bounds(buf.size, group.size)
            own = slice(chunks[group.rank], chunks[group.rank + 1])
            wide = buf.astype(sum_dtype(buf.dtype), copy=False)
            short = wide.nbytes <= DIRECT_BYTES
            yield from self._combine(wide, chunks, operator.combine, tag)
            operator.finish(wide[own], group.size)
            if wide is not buf:
                np.copyto(buf[own], wide[own], casting="unsafe")
            if short:
                yield from self._straight([buf[own]] * group.size, _parts(buf, chunks), tag)
            else:
                yield from ring.allgather(group, buf, chunks, tag)

    def _combine(self, buf: HostArray, chunks: Sequence[int], combine: np.ufunc, tag: int) -> Steps[None]:
        """Combine all ranks' arrays: each rank's own chunk holds the result then."""
        group = self.group
        if buf.nbytes > DIRECT_BYTES:
            yield from ring.reduce_scatter(group, buf, chunks, tag, combine)
            return
        parts = _parts(buf, chunks)
        own = parts[group.rank]
        come = [np.empty_like(own) for _ in parts]
        yield from self._straight(parts, come, tag)
        come[group.rank][...] = own
        in_order(own, come, combine)

    def _straight(self, outgoing: Sequence[HostArray], incoming: Sequence[HostArray], tag: int) -> Steps[None]:
        """Send `outgoing[rank]` to, receive `incoming[rank]` from each other rank. Not by `exchange`, whose queue takes
        all messages of the tag, also those of a ring that comes next.
        """
        group = self.group
        others = [(group.rank + step) % group.size for step in range(1, group.size)]  # not all send to rank 0 first
        receives = [group.irecv(incoming[rank], rank, tag) for rank in others if incoming[rank].size]
        yield from [*receives, *(group.isend(outgoing[rank], rank, tag) for rank in others if outgoing[rank].size)]

    def reduce(self, buf: HostArray, out: HostArray, operator: Reduction, root: int, tag: int) -> Steps[None]:
        """Combine `buf` over all ranks into the root's `out` (which may be `buf`), along a binomial tree."""
        group, size = self.group, self.group.size
        me = (group.rank - root) % size
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

    def broadcast(self, arrays: Sequence[HostArray], root: int, tag: int) -> Steps[None]:
        for array in arrays:
            yield from broadcast(self.group, array, root, tag)

    def allgather(self, pairs: Sequence[tuple[HostArray, Sequence[HostArray]]], tag: int) -> Steps[None]:
        for values, outs in pairs:
            yield from self.exchange(dict.fromkeys(range(self.group.size), values), dict(enumerate(outs)), tag)

    def reduce_scatter(
        self, pairs: Sequence[tuple[Sequence[HostArray], HostArray]], operator: Reduction, tag: int
    ) -> Steps[None]:
        """Combine every rank's array number `rank` into `out`; the arrays stay as they are."""
        group = self.group
        for arrays, out in pairs:
            chunks = (0, *(int(end) for end in np.cumsum([array.size for array in arrays])))
            buf = np.concatenate(arrays).astype(sum_dtype(out.dtype), copy=False)
            yield from self._combine(buf, chunks, operator.combine, tag)
            own = buf[chunks[group.rank] : chunks[group.rank + 1]]
            operator.finish(own, group.size)
            np.copyto(out, own, casting="unsafe")

    def exchange(self, outgoing: Mapping[int, HostArray], incoming: Mapping[int, HostArray], tag: int) -> Steps[None]:
        """Send `outgoing[rank]` to, receive `incoming[rank]` from each rank in it, `me` and empty arrays included.
        Raises ShapeMismatch by the length of the message.
        """
        group, me = self.group, self.group.rank
        others = [(me + step) % group.size for step in range(1, group.size)]  # not all ranks send to rank 0 first
        sends = [group.isend(outgoing[rank], rank, tag) for rank in others if rank in outgoing]
        if me in incoming and me in outgoing:
            if incoming[me].size != outgoing[me].size:
                raise ShapeMismatch(
                    f"this rank sends itself {outgoing[me].size} elements, and expects {incoming[me].size}"
                )
            incoming[me][...] = outgoing[me]
        yield from self.receive_queue(tag).receive_all({rank: incoming[rank] for rank in others if rank in incoming})
        yield from sends

    def barrier(self, tag: int) -> Steps[None]:
        """Wait until every rank has begun the call: in step k each rank receives from the rank 2^k before it."""
        group, distance = self.group, 1
        while distance < group.size:
            send = group.isend(TOKEN, (group.rank + distance) % group.size, tag)
            yield group.irecv(np.empty(1, np.uint8), (group.rank - distance) % group.size, tag)
            yield send
            distance *= 2
