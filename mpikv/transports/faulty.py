"""A transport around another one, on which messages are late and overtake each other, as a script says.

For tests: what a real network does once in a thousand runs, it does in every run, and nobody has to sleep for it. A
receive is handed on, or a message that has arrived is found, only some *looks* later; each call of `poll` or `probe` of
this rank is a look. So messages of different senders or tags overtake each other; those of one sender with one tag
stay in their order, as MPI promises.

All that is random follows from a seed and from the order of this rank's own calls.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation, Waiter, Waking, wakes
from mpikv.transports.base import Incoming, Transport, take_first
from mpikv.transports.threads import Fabric

Route = tuple[int, int]  # source and tag


@dataclass(frozen=True)
class Faults:
    """The script of one rank.

    seed: of the delays; with None nothing is late by chance. most_looks: how many looks later something comes at most.
    """

    seed: int | None = None
    most_looks: int = 4


class _DelayedReceive(Waking):
    """A receive that was asked for, and that the transport below begins only later."""

    def __init__(self, transport: FaultyTransport, start: Callable[[], Operation], due: int) -> None:
        self._transport = transport
        self._start = start
        self._started: Operation | None = None
        self._waiter: Waiter | None = None
        self.due = due  # the look from which on it may be started

    def begin(self) -> None:
        self._started = self._start()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.wake()

    def test(self) -> bool:
        if self._started is None:
            self._transport.poll()
        return self._started is not None and self._started.test()

    def wakes(self, waiter: Waiter) -> bool:
        if self._started is not None:
            return wakes(self._started, waiter)
        self._waiter = waiter
        return True


class FaultyTransport:
    """One rank of `inner`, with the faults of its script."""

    local: None = None  # all are messages

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._dice = None if faults.seed is None else random.Random(f"{faults.seed} {inner.rank}")
        self._looks = self._found = 0
        self._receives: dict[Route, deque[_DelayedReceive]] = {}
        self._arrived: dict[Route, deque[tuple[int, int, Incoming]]] = {}  # due, order
        self.rank, self.size, self.max_tag, self.hosts = inner.rank, inner.size, inner.max_tag, inner.hosts
        self.clock, self.recorder, self.ledger = inner.clock, inner.recorder, inner.ledger

    def _due(self) -> int:
        return self._looks + (0 if self._dice is None else self._dice.randint(0, self._faults.most_looks))

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        return self._inner.isend(buf, dest, tag)

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Operation:
        receive = _DelayedReceive(self, lambda: self._inner.irecv(buf, source, tag, room_bytes), self._due())
        self._receives.setdefault((source, tag), deque()).append(receive)
        self._begin_receives()
        return receive

    def _begin_receives(self) -> None:
        for route in tuple(self._receives):
            while route in self._receives and self._receives[route][0].due <= self._looks:
                take_first(self._receives, route).begin()

    def probe(self, tag: int) -> Incoming | None:
        """Do what `Transport.probe` does, later, and with messages of any sender in any order."""
        self._looks += 1
        while (incoming := self._inner.probe(tag)) is not None:
            self._arrived.setdefault((incoming.source, tag), deque()).append((self._due(), self._found, incoming))
            self._found += 1
        routes = [route for route, queue in self._arrived.items() if route[1] == tag and queue[0][0] <= self._looks]
        if not routes:
            return None
        in_order = min(routes, key=lambda route: self._arrived[route][0][1])
        route = in_order if self._dice is None else self._dice.choice(routes)
        return take_first(self._arrived, route)[2]

    def poll(self) -> None:
        self._looks += 1
        self._begin_receives()
        self._inner.poll()

    def close(self) -> None:
        self._inner.close()


class FaultyFabric(Fabric):
    """Thread ranks with faults. faults: makes the script of each rank from its number; hosts: as of `Fabric`."""

    def __init__(self, size: int, faults: Callable[[int], Faults], hosts: Sequence[str] | None = None) -> None:
        super().__init__(size, hosts)
        self._faults = faults

    def rank(self, rank: int) -> Transport:
        return FaultyTransport(super().rank(rank), self._faults(rank))
