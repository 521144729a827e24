"""What each rank says of its values, told to all others before a collective whose own messages cannot carry it.

Allgather of notes (labelled.py): in step k a rank sends the notes that it has by now, its own and those of the next
2^k - 1 ranks, to the rank 2^k before it, and so knows twice as many after each step.

Cost per rank: ceil(log2(p)) messages one after another, 32 (p-1) bytes in all. Restrictions: none.
Source: Bruck, Ho, Kipnis, Upfal and Weathersby, IEEE Trans. Parallel Distrib. Syst. 8 (1997).
"""

from __future__ import annotations

import numpy as np

from mpikv.collectives.labelled import NOTE_BYTES, Said, said_in
from mpikv.engine.request import Steps
from mpikv.transports.base import Group


def exchange(group: Group, own: Said, tag: int) -> Steps[list[Said]]:
    """Tell all ranks what this one says. Returns what each says, by rank.

    group: one that sends host memory. Collective. Yields each request it must wait for.
    """
    p, me = group.size, group.rank
    notes = np.empty((p, NOTE_BYTES), np.uint8)  # this rank's, then those of the ranks after it
    notes[0] = np.frombuffer(own.as_bytes(), np.uint8)
    known = 1
    while known < p:
        n = min(known, p - known)
        send = group.isend(notes[:n].reshape(-1), (me - known) % p, tag)
        yield group.irecv(notes[known : known + n].reshape(-1), (me + known) % p, tag)
        yield send
        known += n
    return [said_in(notes[(rank - me) % p]) for rank in range(p)]
