"""Compares the labels of all ranks, before a collective whose own messages cannot carry their digests.

It is an allgather of digests (placement/labels.py). In step k a rank sends the digests that it has by then, its own and
those of the next 2^k - 1 ranks, to the rank 2^k before it. So each rank has twice as many after each step.

Cost per rank: ceil(log2(p)) messages one after another, 8 (p-1) bytes in all. Restrictions: none.
Source: Bruck, Ho, Kipnis, Upfal and Weathersby, IEEE Trans. Parallel Distrib. Syst. 8 (1997).
"""

from __future__ import annotations

import numpy as np

from mpikv.collectives.labelled import TRAILER
from mpikv.engine.operation import Steps
from mpikv.placement.labels import Comparison
from mpikv.transports.base import Group


def compare(group: Group, comparison: Comparison | None, tag: int) -> Steps[None]:
    """Compare the digests of all ranks; None, on all: only wait until all have begun. group: of host memory."""
    p, me = group.size, group.rank
    digests = np.empty(p, TRAILER)  # this rank's, then those of the ranks after it
    digests[0] = 0 if comparison is None else comparison.own
    known = 1
    while known < p:
        n = min(known, p - known)
        send = group.isend(digests[:n], (me - known) % p, tag)
        yield group.irecv(digests[known : known + n], (me + known) % p, tag)
        yield send
        known += n
    if comparison is not None:
        for digest in digests.tolist():
            comparison.compare(digest)
