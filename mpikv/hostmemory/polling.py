"""How long a rank polls for what another rank of its host is about to do, before it moves anything else on.

First it only polls, again and again: a rank on a core of its own answers within some microseconds. Then it yields its
core between the polls, which costs less than a sleep. A wait that takes longer becomes a request (counters.py), or has
a limit of its own (common_calls.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from mpikv.hostmemory.segment import HostMemory

POLLS = 1500  # of 40 ns
YIELDS = 60  # the other rank is late then, and may need this core
SHARED_CORE_POLLS = 3  # more ranks than cores: the rank that is waited for needs this core
SHARED_CORE_YIELDS = 1500  # a millisecond: a rank that sleeps while others add 4 MiB begins the next step late


class Polling(NamedTuple):
    """How often to poll at first, then how often to yield the core with `yield_` and poll once more after each."""

    polls: range = range(0)
    yields: range = range(0)
    yield_: Callable[[], None] = os.sched_yield

    @classmethod
    def of(cls, memory: HostMemory, size: int) -> Polling:
        """Return what suits `size` ranks that share this memory and work at the same time."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        yield_ = partial(time.sleep, 0) if memory.threads else os.sched_yield
        if memory.threads or size > cores:
            return cls(range(SHARED_CORE_POLLS), range(SHARED_CORE_YIELDS), yield_)
        return cls(range(POLLS), range(YIELDS), yield_)

    def yielded(self, test: Callable[[], bool]) -> bool:
        yield_ = self.yield_
        for _ in self.yields:
            yield_()
            if test():
                return True
        return False


NO_POLLING = Polling()  # every wait becomes a request, and the engine moves other transfers on meanwhile
