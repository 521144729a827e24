"""Adasum: one vector of all ranks' vectors, in which what several of them have in common counts once.

docs/semantics.md ("Adasum") has the formula for two vectors, the order in which those of more ranks are combined in
pairs, and what becomes of a NaN. With W ranks and P the largest power of two in W, rank P + i is *folded* first: it
sends its vector to rank i, which combines the two. Then the first P ranks are combined as a tree.

Each of the log2(P) steps halves what a rank holds (recursive halving, with the ranks in an order in which partners are
neighbours first): partners exchange halves, so that of one half each has both vectors. The vectors of a step's pair lie
in parts on all ranks that were combined so far. So each rank calculates the three products `a·a`, `a·b`, `b·b` of its
part in float64, and these ranks add them up by recursive doubling, before each combines its part. The same exchanges
backwards bring the whole result to all. Every element is made by one rank and copied by the others, and the products
are added in an order that the ranks alone decide: all ranks have the same bits.

Cost per rank: 2 log2(P) messages with 2n(P-1)/P elements, and (log2(P) + 1) log2(P) / 2 messages of 24 bytes (the
folded ranks and their partners: 2n elements more, and products of n); 3n multiplications and additions in float64 and
as many in the vectors' dtype. Scratch: n/2 elements (n at a partner of a folded rank). Restrictions: floating dtypes.
Source: Maleki et al., Scaling Distributed Training with Adaptive Summation (2020), arXiv:2006.02924; halving and
doubling: Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Steps
from mpikv.placement.keys import even_bounds
from mpikv.spaces.base import Space, SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.transports.base import Group

Products = npt.NDArray[np.float64]  # a·a, a·b and b·b

# Elements that are widened to float64 at a time: two blocks stay in a processor's cache, and a BLAS calculates so short
# a product in one thread, always in the same order (OpenBLAS uses several threads from 10000 elements on).
BLOCK_ELEMS = 8192


def of_space(group: Group, space: Space, values: SpaceArray, tag: int, *, changeable: bool) -> Steps[SpaceArray]:
    """Adasum of all ranks' `values`, (n,), in `space`: in a new array, unless they are `changeable`. Collective."""
    if not isinstance(space, DeviceSpace):
        result = values if changeable else values.copy()
        yield from allreduce(group, result, tag)
        return result
    result = values if changeable else space.empty(values.size, values.dtype)
    on_host = space.page_locked(values.nbytes).view(values.dtype)
    space.download(on_host, values)
    yield space.stream_event()
    yield from allreduce(group, on_host, tag)
    space.upload(result, on_host)
    return result


def allreduce(group: Group, buf: HostArray, tag: int) -> Steps[None]:
    """Combine `buf`, (n,), contiguous, float32 or float64, of all ranks, in place. Collective."""
    core, me = 1 << (group.size.bit_length() - 1), group.rank
    if not buf.size:
        return
    if me >= core:
        yield group.isend(buf, me - core, tag)
        yield group.irecv(buf, me - core, tag)
        return
    folded = me + core if me + core < group.size else None
    if folded is not None:
        other = group.empty(buf.size, buf.dtype)
        yield group.irecv(other, folded, tag)
        _combine(buf, other, _products(buf, other), buf)
        del other
    part, chunks = group.part(_neighbours_first(core)), even_bounds(buf.size, core)
    yield from _halve(part, buf, chunks, tag)
    yield from _allgather(part, buf, chunks, tag)
    if folded is not None:
        yield group.isend(buf, folded, tag)


def _neighbours_first(core: int) -> list[int]:
    """The ranks in the order in which the first of `_exchanges` is between neighbours, as 0 and 1.

    There the partners of the first exchange are `core / 2` apart, of the next one half of that. So the bits of a rank's
    place in the order are those of the rank, backwards.
    """
    order = [0]
    while len(order) < core:
        order = [2 * rank for rank in order] + [2 * rank + 1 for rank in order]
    return order


def _exchanges(rank: int, chunks: Sequence[int]) -> Iterator[tuple[int, slice, slice]]:
    """How a rank comes to its own chunk: for each step its partner, what it keeps, and what it gives to the partner."""
    low, high = 0, len(chunks) - 1  # the chunks that this rank still holds
    while high - low > 1:
        middle = (low + high) // 2
        keep, give = ((low, middle), (middle, high)) if rank < middle else ((middle, high), (low, middle))
        yield rank ^ (middle - low), slice(chunks[keep[0]], chunks[keep[1]]), slice(chunks[give[0]], chunks[give[1]])
        low, high = keep


def _allgather(group: Group, buf: HostArray, chunks: Sequence[int], tag: int) -> Steps[None]:
    """Bring every rank's own chunk to all, by the same exchanges backwards."""
    for partner, mine, theirs in reversed(list(_exchanges(group.rank, chunks))):
        send = group.isend(buf[mine], partner, tag) if buf[mine].size else None
        if buf[theirs].size:
            yield group.irecv(buf[theirs], partner, tag)
        if send is not None:
            yield send


def _halve(group: Group, buf: HostArray, chunks: Sequence[int], tag: int) -> Steps[None]:
    """Combine what the ranks hold, step by step; then each rank's own chunk of its `buf` holds the result."""
    partners: list[int] = []
    for partner, keep, give in _exchanges(group.rank, chunks):
        kept, given = buf[keep], buf[give]
        send = group.isend(given, partner, tag) if given.size else None
        other = group.empty(kept.size, buf.dtype)
        if kept.size:
            yield group.irecv(other, partner, tag)
        if send is not None:
            yield send
        lower_first = (kept, other) if group.rank < partner else (other, kept)
        partners.append(partner)
        products = yield from _added(group, _products(*lower_first), partners, tag)
        _combine(*lower_first, products, kept)


def _added(group: Group, products: Products, partners: Sequence[int], tag: int) -> Steps[Products]:
    """Add up the products of all ranks that hold parts of these vectors: those that `partners` lead to, one by one."""
    for partner in partners:
        other = np.empty_like(products)
        send = group.isend(products, partner, tag)
        yield group.irecv(other, partner, tag)
        yield send
        # The lower rank's first, as everywhere: of two NaNs NumPy keeps the first one's bits.
        products = products + other if group.rank < partner else other + products
    return products


def _products(one: HostArray, other: HostArray) -> Products:
    found = np.zeros(3)
    with np.errstate(all="ignore"):  # infinities, and squares that overflow (docs/semantics.md)
        for begin in range(0, one.size, BLOCK_ELEMS):
            a = one[begin : begin + BLOCK_ELEMS].astype(np.float64)
            b = other[begin : begin + BLOCK_ELEMS].astype(np.float64)
            found += (a @ a, a @ b, b @ b)
    return found


def _combine(one: HostArray, other: HostArray, products: Products, out: HostArray) -> None:
    """Write Adasum of the two, both of which are scratch afterwards, to `out`, which is one of them."""
    of_one, common, of_other = products.tolist()
    with np.errstate(all="ignore"):
        np.multiply(one, _factor(common, of_one), out=one)
        np.multiply(other, _factor(common, of_other), out=other)
        np.add(one, other, out=out)


def _factor(common: float, norm: float) -> float:
    """What a vector of this squared norm is multiplied by. common: its product with the other vector."""
    return 1.0 if norm == 0.0 else 1.0 - common / (2.0 * norm)
