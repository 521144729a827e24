"""What each rank says of its labels, told to all others before a collective whose own messages cannot carry it.

Allgather of digests (labels.py): in step k a rank sends those that it has by now, its own and those of the next
2^k - 1 ranks, to the rank 2^k before it, and so knows twice as many after each step.

Cost per rank: ceil(log2(p)) messages one after another, 8 (p-1) bytes in all. Restrictions: none.
Source: Bruck, Ho, Kipnis, Upfal and Weathersby, IEEE Trans. Parallel Distrib. Syst. 8 (1997).
"""

from __future__ import annotations

import numpy as np

from mpikv.collectives.labelled import NOTE
from mpikv.engine.operation import Steps
from mpikv.placement.labels import Comparison
from mpikv.transports.base import Group


def compare(group: Group, comparison: Comparison | None, tag: int) -> Steps[None]:
    """Tell all ranks what this one says, and compare. Nobody ends before all have begun.

    group: one that sends host memory. comparison: None, on all ranks, where nothing is compared. Collective. Yields
    each request it must wait for.
    """
    p, me = group.size, group.rank
    notes = np.empty(p, NOTE)  # this rank's, then those of the ranks after it
    notes[0] = 0 if comparison is None else comparison.own
    known = 1
    while known < p:
        n = min(known, p - known)
        send = group.isend(notes[:n], (me - known) % p, tag)
        yield group.irecv(notes[known : known + n], (me + known) % p, tag)
        yield send
        known += n
    if comparison is not None:
        for digest in notes.tolist():
            comparison.compare(digest)
