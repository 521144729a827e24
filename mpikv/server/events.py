"""Events: what a server's core returns for its loop to do: send replies and refusals, fetch partitions from workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation, Predicate

if TYPE_CHECKING:
    from mpikv.server.memory import ReadableMemory
    from mpikv.server.shard import Push, ServedShard


class ServerReply(NamedTuple):
    """Send `data` to `worker`. The array does not change before `block.release()` is called.

    ready: a request that is done when the values are in `data`. Such requests are done in order.
    """

    worker: int
    tag: int
    data: HostArray
    priority: int = 0
    block: ReadableMemory | None = None
    ready: Operation | None = None


class Fetch(NamedTuple):
    """Receive the next partition of a push, in the order of these events for one (worker, tag).

    shard: None: the partition, of `n_bytes`, is received but not used.
    """

    shard: ServedShard | None
    push: Push
    partition: int
    n_bytes: int = 0


class Refusal(NamedTuple):
    """Send all workers the reason why a key was not updated in a round; none where they find out by themselves."""

    key_id: int
    round: int
    text: str


Event = ServerReply | Fetch | Refusal


class Batch:
    """The answers to several pulls of one message: one reply, sent when all of them are complete."""

    def __init__(self, worker: int, tag: int, priority: int, count: int) -> None:
        self._worker, self._tag, self._priority, self._missing = worker, tag, priority, count
        self._answers: list[list[HostArray]] = [[] for _ in range(count)]
        self._blocks: list[ReadableMemory] = []  # memory that answers are still being copied to
        self._ready: Operation | None = None  # done when the last of these copies is

    def add(self, index: int, values: HostArray) -> None:
        self._answers[index].append(values.copy().view(np.uint8))

    def expect(self, index: int, block: ReadableMemory, ready: Operation) -> None:
        """Add the next partition of an answer, which will be in `block` once `ready` is done, after all others."""
        self._answers[index].append(block.array.view(np.uint8))
        self._blocks.append(block)
        self._ready = ready

    def done(self) -> ServerReply | None:
        """Count a complete answer; returns the reply when it was the last one."""
        self._missing -= 1
        if self._missing:
            return None
        arrays = [values for answer in self._answers for values in answer]
        data: HostArray = np.empty(sum(values.size for values in arrays), np.uint8)
        ready = self._ready

        def joined() -> bool:
            if ready is not None and not ready.test():
                return False
            if arrays:  # only once: afterwards the memory that was read here may hold something else
                np.concatenate(arrays, out=data)
                arrays.clear()
            for block in self._blocks:
                block.release()
            self._blocks = []
            return True

        if ready is None:
            joined()
        return ServerReply(self._worker, self._tag, data, self._priority, ready=ready and Predicate(joined))


@dataclass(slots=True, eq=False)
class PendingPull:
    """A pull of one shard. version: the one that it waits for. partition: the next one to be answered.

    batch, index: the reply that its answer is a part of, and which one it is there. by_loopback: it is passed on in
    device memory, within the process.
    """

    worker: int
    tag: int
    version: int
    priority: int
    batch: Batch | None
    index: int
    uncompressed: bool
    by_loopback: bool
    partition: int = 0
