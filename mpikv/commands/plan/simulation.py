"""Workers and servers in a simulated network: the real generators move on in a virtual time, without threads.

Only servers are simulated: how long a step with them takes depends on whose turn it is on their links, and on what
waits behind what, which no formula gives. The time of an allreduce follows from its counts (`allreduce.py`).

Events happen in the order of their times. A message waits for its host's link out, takes its time there, reaches the
link in of the other host a latency later, waits there for its sender's turn, and has arrived when its last byte has
come through. Where a link in is behind by `NETWORK_BYTES` of one sender, that sender's messages to other hosts go
first, as over connections of their own. A long message is announced first and leaves when its receiver, which must have
asked for it, has looked and agreed, as in MPI. A rank sees what has arrived at its next look (`waiting.py`), pays for
it, and runs as far as it can; what it sends meanwhile leaves at the time that its core has come to.

Cost: some 50 us for each message. Restrictions: nothing is lost, the network's inside is never congested, every rank
has a core of its own.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from mpikv.commands.plan.costs import LOCAL_LATENCY_S, SOCKET_BYTES, Costs, Link
from mpikv.commands.plan.ranks import Message, Rank
from mpikv.commands.plan.waiting import Rhythm
from mpikv.errors import MpikvError
from mpikv.placement.topology import topology

# Connections share a link in evenly at first, while their windows are small; later one that has it keeps it for a
# while. So a turn is as long as what its sender has had since the link was idle, within these limits, which were chosen
# so that servers with two and three workers take the times that were measured (tests/fixtures/plan_measured.md).
SHORTEST_TURN_BYTES, LONGEST_TURN_BYTES = 256 << 10, 8 << 20
NETWORK_BYTES = 1 << 20  # of one sender under way to one host: a window of TCP's, about
HEARTBEAT = 1 << 14  # events between two calls of `alive`


class Use(NamedTuple):
    """Seconds in which a resource was at work."""

    out_s: float
    in_s: float
    core_s: float


class _Flight(NamedTuple):
    """A message on links. out_s, in_s: how long it keeps each of them busy."""

    order: int
    message: Message
    n_bytes: int
    out_s: float
    in_s: float


class _Port:
    """One host's link.

    Out: messages to one host go in their order; those to others go meanwhile, where that host's link in is behind. In:
    the senders take turns.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.claimed_s = 0.0  # when all that its ranks have handed over so far will have left, if nothing is behind
        self.out_s = self.in_s = 0.0
        self._leaving: dict[_Port, deque[_Flight]] = {}
        self._ready: list[tuple[int, int, _Port]] = []  # heap of ports that something may leave for, oldest first
        self._behind: set[_Port] = set()
        self._out_busy = False
        self._coming: dict[_Port, deque[_Flight]] = {}  # in turn
        self._in_busy = False
        self._turn_bytes = 0
        self._had_bytes: dict[_Port, int] = {}  # by sender, since the link was idle
        self._under_way: dict[_Port, int] = {}  # bytes by sender

    def leave(self, time_s: float, to: _Port, flight: _Flight) -> None:
        """Send a message as soon as the link is free for it."""
        waiting = self._leaving.setdefault(to, deque())
        waiting.append(flight)
        if len(waiting) == 1 and to not in self._behind:
            heapq.heappush(self._ready, (flight.order, id(to), to))
        if not self._out_busy:
            self._next_out(time_s)

    def _next_out(self, time_s: float) -> None:
        while self._ready:
            _, _, to = heapq.heappop(self._ready)
            if to._under_way.get(self, 0) > NETWORK_BYTES:  # noqa: SLF001 - of the same class
                self._behind.add(to)
                continue
            flight = self._leaving[to].popleft()
            to._under_way[self] = to._under_way.get(self, 0) + flight.n_bytes  # noqa: SLF001 - of the same class
            self._enter(to)
            self._out_busy = True
            self.out_s += flight.out_s
            single_s = min(flight.out_s, flight.in_s)  # where it stands for several, the last of them
            begin_s = time_s + flight.out_s - single_s + self._simulation.link.latency_s
            self._simulation.at(begin_s, partial(to.come, self, flight))
            self._simulation.at(time_s + flight.out_s, self._out_free)
            return

    def _out_free(self, time_s: float) -> None:
        self._out_busy = False
        self._next_out(time_s)

    def _enter(self, to: _Port) -> None:
        """Look at the messages that wait for that link."""
        waiting = self._leaving[to]
        if waiting:
            heapq.heappush(self._ready, (waiting[0].order, id(to), to))

    def caught_up(self, time_s: float, to: _Port) -> None:
        """Note that that link in is not behind any more."""
        if to in self._behind:
            self._behind.discard(to)
            self._enter(to)
            if not self._out_busy:
                self._next_out(time_s)

    def come(self, sender: _Port, flight: _Flight, time_s: float) -> None:
        """Take the first byte of a message."""
        self._coming.setdefault(sender, deque()).append(flight)
        if not self._in_busy:
            self._next_in(time_s)

    def _next_in(self, time_s: float) -> None:
        """Take a message of the sender whose turn it is, or of the next one."""
        sender = next(iter(self._coming))
        flight = self._coming[sender].popleft()
        self._in_busy = True
        self._turn_bytes += flight.n_bytes
        self._had_bytes[sender] = self._had_bytes.get(sender, 0) + flight.n_bytes
        self.in_s += flight.in_s

        def through(now_s: float) -> None:
            self._in_busy = False
            waiting = self._coming[sender]
            if not waiting:
                del self._coming[sender]
                self._turn_bytes = 0
            elif self._turn_bytes >= min(max(self._had_bytes[sender], SHORTEST_TURN_BYTES), LONGEST_TURN_BYTES):
                self._coming[sender] = self._coming.pop(sender)  # behind the others
                self._turn_bytes = 0
            self._under_way[sender] -= flight.n_bytes
            flight.message.arrive(now_s)
            if self._coming:
                self._next_in(now_s)
            else:
                self._had_bytes.clear()
            sender.caught_up(now_s, self)

        self._simulation.at(time_s + flight.in_s, through)


class Simulation:
    """The network and its ranks.

    hosts: of each rank. servers: ranks that wait as servers do. weight: how many workers each worker stands for, at
    servers. alive: a function that is called now and then.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        link: Link,
        costs: Costs,
        *,
        servers: Collection[int] = (),
        weight: float = 1.0,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        found = topology(hosts)
        self.hosts = tuple(hosts)
        self.link, self.costs = link, costs
        self.time_s = 0.0
        self.current: Rank | None = None  # the one whose core works
        self.weight = weight
        self._alive = alive
        self._host_of = found.host_of
        self._ports = [_Port(self) for _ in found.hosts]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        worker_rhythm, server_rhythm = Rhythm(costs), Rhythm(costs, server=True)
        self.ranks = [
            Rank(self, rank, server_rhythm if rank in servers else worker_rhythm) for rank in range(len(self.hosts))
        ]

    def added(self, n_bytes: int) -> None:
        """Count bytes that the current rank's core has added."""
        if self.current is not None:
            self.current.pay_work(n_bytes * self.costs.add_byte_s)

    def worked(self, seconds: float) -> None:
        """Count the work of a codec on the current rank's core."""
        if self.current is not None:
            self.current.pay_work(seconds)

    # --- events

    def at(self, time_s: float, event: Callable[[float], None]) -> None:
        """Let something happen at a time."""
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, event))

    def run(self) -> None:
        """Run until nothing happens any more. Raises MpikvError where a rank then still waits."""
        count = 0
        while self._events:
            self.time_s, _, event = heapq.heappop(self._events)
            event(self.time_s)
            count += 1
            if count % HEARTBEAT == 0:
                self._alive()
        stuck = [rank.rank for rank in self.ranks if rank.waits]
        if stuck:
            raise MpikvError(f"the simulation has come to a stop: rank {stuck[0]} waits for a message never sent")

    # --- messages

    def is_local(self, one: int, other: int) -> bool:
        """Return whether two ranks share a host."""
        return self._host_of[one] == self._host_of[other]

    def _port(self, rank: Rank) -> _Port:
        return self._ports[self._host_of[rank.rank]]

    def hand_over(self, sender: Rank, message: Message, *, local: bool, n_bytes: int, out: float, into: float) -> float:
        """Let a rank's core give a message to the kernel now. Returns when the message's memory is free again.

        out, into: how many messages it stands for on the link of its sender and on that of its receiver.
        """
        now_s = sender.now_s
        if local:
            self.at(now_s + LOCAL_LATENCY_S, message.arrive)
            return now_s
        seconds = self.link.time_s(n_bytes)
        port, other = self._port(sender), self._port(message.receiver)
        port.claimed_s = max(now_s, port.claimed_s) + out * seconds

        self._order += 1
        flight = _Flight(self._order, message, n_bytes, out * seconds, into * seconds)
        self.at(now_s, lambda time_s: port.leave(time_s, other, flight))
        return max(now_s, port.claimed_s - out * SOCKET_BYTES / self.link.bytes_per_s)

    # --- results

    def use(self, rank: int) -> Use:
        """Return how much a simulated rank's host and core were at work."""
        port = self._ports[self._host_of[rank]]
        return Use(port.out_s, port.in_s, self.ranks[rank].busy_s)
