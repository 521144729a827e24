"""Keys in the memory of each host, where workers sit on several hosts and more than one of them on some.

Worker 0 gives out places, the same on every host, one behind the other, and the others learn them when they agree on a
key or an array. Nothing is ever given back. What a host's workers do there for a key is in collectives/hosted.

No message calls a worker that waits for another of its host. So each worker has a word that changes whenever it has
counted something; the progress engine looks at these words in each of its steps, and at the counters of the keys under
way when one has changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpikv.arrays import HostArray, sum_dtype
from mpikv.collectives.host_key import HostKey, place_bytes
from mpikv.engine.request import Steps
from mpikv.hostmemory.segment import ALIGN_BYTES, WORD_BYTES, HostMemory, Space, aligned
from mpikv.topology import topology
from mpikv.transports.base import Transport

LINE = ALIGN_BYTES // WORD_BYTES
WIDEST_WIRE_BYTES = 4  # what elements that are shorter are added in, at most: float16 in float32


class HostKeys:
    """One worker's view of its host's memory. A request that is never done: it wakes whoever has something to do."""

    def __init__(self, memory: HostMemory, transport: Transport) -> None:
        found = topology(transport.hosts)
        self.memory = memory
        self._transport = transport
        self._n_lanes = found.carriers
        self._most = max(len(ranks) for ranks in found.hosts)
        self._words = memory.words(0, memory.size * LINE)
        self._seen = b""
        self._space = Space(self._most * ALIGN_BYTES, memory.n_bytes)  # kept by worker 0 alone
        self._under_way: dict[HostKey, Any] = {}

    # --- places

    def reserve_key(self, n_elems: int, itemsize_bytes: int) -> int | None:
        """At worker 0: where a key is on every host. None when the smallest memory is full."""
        return self._space.reserve(
            place_bytes(n_elems, itemsize_bytes, max(itemsize_bytes, WIDEST_WIRE_BYTES), self._most)
        )

    def reserve_arrays(self, n_bytes: int) -> int | None:
        """The same for `n_bytes` of each worker."""
        return self._space.reserve(aligned(n_bytes) * self._most)

    def key(self, begin: int, n_elems: int, dtype: np.dtype[Any]) -> HostKey:
        """A key at its place."""
        return HostKey(self.memory, begin, n_elems, (dtype, sum_dtype(dtype)), self._n_lanes, on_count=self._count)

    def array(self, begin: int, n_bytes: int) -> HostArray:
        """This worker's part of a place for arrays."""
        return self.memory.array(begin + self.memory.rank * aligned(n_bytes), n_bytes, np.dtype(np.uint8))

    # --- waking

    def _count(self) -> None:
        self._words[self.memory.rank * LINE] += 1

    def watched(self, key: HostKey, steps: Steps[None]) -> Steps[None]:
        """`steps` that are moved on whenever a worker of this host has counted something of `key`."""
        owner = getattr(self._transport, "owner", None)
        if owner is not None:
            self._under_way[key] = owner
        try:
            yield from steps
        finally:
            self._under_way.pop(key, None)

    def listen(self) -> Steps[None]:
        """For the progress engine: look in each of its steps."""
        while True:
            yield self

    def test(self) -> bool:
        """Wake the transfers of keys that somebody has counted for."""
        seen = self._words.tobytes()
        if seen != self._seen:
            self._seen = seen
            for key, owner in self._under_way.items():
                if key.changed():
                    owner.woken = True
        return False
