"""Memory for the temporaries of an update, kept from one update to the next.

Memory of such a length that is made and let go each time may come as new pages each time (M_MMAP_THRESHOLD in
mallopt(3)), whose faults take as long as the arithmetic. Shorter and longer memory is new.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray

SMALL_BYTES, KEPT_BYTES = 1 << 14, 1 << 20


class Scratch:
    """An optimizer's memory for temporaries.

    Threads may share it: an operation of a list is whole (also in Python without the GIL), so no two get the same.
    """

    def __init__(self) -> None:
        self._kept: list[HostArray] = []

    def __reduce__(self) -> Any:
        """Pickled or copied: a new one, which holds nothing."""
        return Scratch, ()

    def take(self, n_bytes: int) -> HostArray:
        """(n_bytes or more,) of uint8 and any content, which nobody else has until it is given back."""
        if SMALL_BYTES <= n_bytes <= KEPT_BYTES:
            try:
                kept = self._kept.pop()
            except IndexError:
                pass
            else:
                if kept.size >= n_bytes:
                    return kept
        return np.empty(n_bytes, np.uint8)

    def give(self, memory: HostArray) -> None:
        """Keep what `take` returned. As many are kept as updates were under way at once."""
        if SMALL_BYTES <= memory.size <= KEPT_BYTES:
            self._kept.append(memory)
