"""Binomial-tree broadcast, for the initial values of keys.

Ranks are counted from the root. Rank r receives from the rank whose number is r without its lowest set bit, and sends
to r plus each lower power of two.

Cost: log2(p) steps of n elements. Restrictions: none.
"""

from __future__ import annotations

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Steps
from mpikv.transports.base import Group


def broadcast(group: Group, buf: HostArray, root: int, tag: int) -> Steps[None]:
    """Copy the root's `buf` to every rank. buf: (n,), contiguous, same n and dtype everywhere. Collective."""
    p = group.size
    me = (group.rank - root) % p
    if buf.size == 0:
        return
    bit = 1
    while bit < p and not me & bit:
        bit *= 2
    if me:
        yield group.irecv(buf, (me - bit + root) % p, tag)
    sends = []
    bit //= 2
    while bit:
        if me + bit < p:
            sends.append(group.isend(buf, (me + bit + root) % p, tag))
        bit //= 2
    yield from sends
