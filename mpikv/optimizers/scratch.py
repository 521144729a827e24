"""Memory for the temporaries of an update, kept from one update to the next.

Memory of such a length that is made and let go each time may come as new pages each time (M_MMAP_THRESHOLD in
mallopt(3)), whose faults take as long as the arithmetic. Shorter and longer memory is new.
"""

from __future__ import annotations

import threading

import numpy as np

from mpikv.arrays import HostArray

SMALL_BYTES, KEPT_BYTES = 1 << 14, 1 << 20


class Scratch(threading.local):
    """This thread's memory for blocks."""

    def __init__(self) -> None:
        self._kept = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> HostArray:
        """(n_bytes or more,) of uint8 and any content."""
        if n_bytes < SMALL_BYTES or n_bytes > KEPT_BYTES:
            return np.empty(n_bytes, np.uint8)
        # Nobody else has it meanwhile: a formula may make an update of its own.
        kept, self._kept = self._kept, np.empty(0, np.uint8)
        return kept if kept.size >= n_bytes else np.empty(n_bytes, np.uint8)

    def give(self, memory: HostArray) -> None:
        """Keep what `take` returned, unless what is kept is larger."""
        if SMALL_BYTES <= memory.size <= KEPT_BYTES and memory.size > self._kept.size:
            self._kept = memory


SCRATCH = Scratch()
