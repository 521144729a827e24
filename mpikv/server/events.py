"""What a server's core asks its loop to do: send replies and refusals, fetch partitions that wait at workers."""

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
    """Send `data` to `worker` with `tag`. The array does not change before `block.release()` is called.

    ready: when its values are there; None: now. Replies with one are ready in their order.
    """

    worker: int
    tag: int
    data: HostArray
    priority: int = 0
    block: ReadableMemory | None = None
    ready: Operation | None = None


class Fetch(NamedTuple):
    """Receive the next partition of a push, in the order of these events for one (worker, tag).

    shard: None: it is received to be thrown away, `n_bytes` of it.
    """

    shard: ServedShard | None
    push: Push
    part: int
    n_bytes: int = 0


class Refusal(NamedTuple):
    """Tell all workers that nothing was updated in a round of a key, and why."""

    key_id: int
    text: str


Event = ServerReply | Fetch | Refusal


class Batch:
    """The answers to several pulls of one message: one reply, sent when all of them are there."""

    def __init__(self, worker: int, tag: int, priority: int, count: int) -> None:
        self._worker = worker
        self._tag = tag
        self._priority = priority
        self._answers: list[list[HostArray]] = [[] for _ in range(count)]
        self._blocks: list[ReadableMemory] = []  # that answers still come into
        self._ready: Operation | None = None  # when the last of them has
        self._missing = count

    def add(self, index: int, values: HostArray) -> None:
        """Keep a copy of the next partition of an answer."""
        self._answers[index].append(values.copy().view(np.uint8))

    def expect(self, index: int, block: ReadableMemory, ready: Operation) -> None:
        """The next partition of an answer will be in a block, ready after all others."""
        self._answers[index].append(block.array.view(np.uint8))
        self._blocks.append(block)
        self._ready = ready

    def done(self) -> ServerReply | None:
        """One answer is complete; the reply when it was the last one."""
        self._missing -= 1
        if self._missing:
            return None
        arrays = [values for answer in self._answers for values in answer]
        data: HostArray = np.empty(sum(values.size for values in arrays), np.uint8)
        ready = self._ready

        def joined() -> bool:
            if ready is not None and not ready.test():
                return False
            if arrays:  # only once: what was read here may be used for something else afterwards
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
    """A pull of one shard. version: what it waits for. part: the next partition to be answered.

    batch, index: it is that answer of the batch. plain: the answer travels uncompressed, whatever the key's codec.
    handed: it is handed over in device memory, within the process.
    """

    worker: int
    tag: int
    version: int
    priority: int
    batch: Batch | None
    index: int
    plain: bool
    handed: bool
    part: int = 0
