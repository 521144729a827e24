"""What a transport is: ranks that send each other bytes.

A transport moves contiguous NumPy arrays between ranks, two-sided, in order for one (sender, receiver, tag). It never
waits by itself: every call returns at once, and waiting is the business of the engine. There are two of them: `mpi`
between processes, `threads` between threads of one process, for tests. `Group` is a transport seen by some of its
ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.clock import Clock
from mpikv.engine.operation import Operation
from mpikv.observe.recorder import Recorder
from mpikv.transports.ledger import Ledger

T = TypeVar("T")
Name = TypeVar("Name")


class Incoming(Protocol):
    """A message that has arrived, and that is received once there is memory of its size."""

    source: int
    n_bytes: int

    def receive(self, buf: HostArray) -> Operation:
        """Start receiving it into `buf`, which is contiguous and has `n_bytes` bytes."""
        ...


class Transport(Protocol):
    """Ranks 0..size-1 that send each other arrays. One per store; closing it is collective."""

    rank: int
    size: int
    max_tag: int
    hosts: tuple[str, ...]  # the host of each rank
    clock: Clock  # what limits to waiting are measured by
    recorder: Recorder  # of what this rank does in the store that the transport is of

    @property
    def local(self) -> Any:
        """Return what of it goes through memory that ranks of a host share (`LocalTransport`); None: nothing does."""
        ...

    @property
    def ledger(self) -> Ledger:
        """Return what this rank has sent since the start, counted."""
        ...

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        """Start sending a contiguous array. The caller must not change it until the request is done."""
        ...

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Operation:
        """Start receiving exactly `buf.nbytes` bytes into a contiguous array, or exactly `room_bytes` less.

        A shorter message is a ShapeMismatch. A longer one must not come: MPI may write it behind the array. Where ranks
        have not agreed on the length, `probe` says it before memory is needed.
        """
        ...

    def probe(self, tag: int) -> Incoming | None:
        """Return the next message with this tag from any rank, and take it off the queue; None where there is none."""
        ...

    def poll(self) -> None:
        """Find out what is done, and wake those who wait for it. Cheap where nothing is under way."""
        ...

    def close(self) -> None:
        """Give back what the transport holds. Nothing may be under way any more."""
        ...


def take_first(queues: dict[Name, deque[T]], name: Name) -> T:
    """Take the first of the queue of this name, which goes with its last one."""
    queue = queues[name]
    found = queue.popleft()
    if not queue:
        del queues[name]
    return found


class Group:
    """Some ranks of a transport, numbered from 0 in the order given. The collectives run over groups.

    on_device: whether its messages are arrays in device memory.
    """

    on_device = False

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self.transport = transport
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(transport.rank)

    @cached_property  # most groups are those of a key, and are never asked
    def hosts(self) -> tuple[str, ...]:
        """The host of each of its ranks."""
        return tuple(self.transport.hosts[rank] for rank in self.ranks)

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        return self.transport.isend(buf, self.ranks[dest], tag)

    def irecv(self, buf: HostArray, source: int, tag: int) -> Operation:
        return self.transport.irecv(buf, self.ranks[source], tag)

    def room(self, dtype: np.dtype[Any]) -> int:
        """Return by how many elements an array that a reduce-scatter receives into must be longer than the values."""
        return 0

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """Return new memory of any content, (n_elems,), of the kind that this group sends and receives."""
        return np.empty(n_elems, dtype)

    def part(self, ranks: Sequence[int]) -> Group:
        """Make a group of the same kind from some of the ranks of this one."""
        return Group(self.transport, [self.ranks[rank] for rank in ranks])


class Arrival:
    """A request that is done when a message with `tag` has arrived; `incoming` is the message then."""

    def __init__(self, transport: Transport, tag: int) -> None:
        self._transport = transport
        self._tag = tag
        self.incoming: Any = None

    def test(self) -> bool:
        if self.incoming is None:
            self.incoming = self._transport.probe(self._tag)
        return self.incoming is not None
