"""How long a rank looks by itself for what another rank of its host is about to do, before anything else waits for it.

First it polls: a rank on a core of its own answers within some microseconds. Then it gives its core away again and
again, which costs less than a nap. What takes longer is a request (counters.py) or has its own limit (together.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from mpikv.hostmemory.segment import HostMemory

POLLS = 1500  # of 40 ns
YIELDS = 60  # then it was late, and its core may be ours
CROWDED_POLLS = 3  # more ranks than cores: whoever we wait for needs our core
CROWDED_YIELDS = 1500  # a millisecond: whoever naps while others add 4 MiB comes late to the next step


class Patience(NamedTuple):
    """So many polls, then so often `yield_`, which gives up the core."""

    polls: range = range(0)
    yields: range = range(0)
    yield_: Callable[[], None] = os.sched_yield

    @classmethod
    def of(cls, memory: HostMemory, size: int) -> Patience:
        """What suits `size` ranks that share this memory and work at the same time."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        yield_ = partial(time.sleep, 0) if memory.threads else os.sched_yield
        if memory.threads or size > cores:
            return cls(range(CROWDED_POLLS), range(CROWDED_YIELDS), yield_)
        return cls(range(POLLS), range(YIELDS), yield_)

    def yielded(self, test: Callable[[], bool]) -> bool:
        """Give the core away until `test()`; False: that takes longer."""
        yield_ = self.yield_
        for _ in self.yields:
            yield_()
            if test():
                return True
        return False


AT_ONCE = Patience()  # of who has other things to do meanwhile: the engine waits for it
